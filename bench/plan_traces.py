"""Write the shipped traces.

    python bench/plan_traces.py                  what the archive lacks of every model of the catalog
    python bench/plan_traces.py --again MODEL    of models that are named, also what it has already
    python bench/plan_traces.py --plans          what plans ask for
    python bench/plan_traces.py --seconds 600    as much as begins in that time

Of a model these are full training, LoRA and QLoRA on packs in bf16 on a GPU, with and without recomputation. Plans are
those of the repository's recipes, and of models, the smallest first, on a GPU without flash attention; words select
those with one of them in their name. Traces of the archive are read whatever code made them: after a change of what a
trace is, they are to be made again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trainwright as tw
from trainwright.planning.trace import store
from trainwright.planning.trace.catalog import list_models, look_up_model
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import load_trace, normalize_request, read_model_facts
from trainwright.recipe.sections.model import AdapterSection
from trainwright.utils.text import say

REGIME = Regime(chunked=True)
RECIPES = Path(__file__).parents[1] / "recipes"
WITH_FLASH, WITHOUT_FLASH = "8xH100", "1xT4"
LARGEST = 10**10  # parameters of a model that is planned for the latter
_Values = dict[str, dict[str, Any]]  # by the name of their model and their key


def requests(model: TracedModel) -> Iterator[TraceRequest]:
    """Yield what is shipped of a model."""
    for recompute in ("none", "full", "selective"):
        yield normalize_request(TraceRequest(model, Device("cuda"), "bf16", "packed", recompute), REGIME)


def main() -> None:
    """Trace what is missing and write the archive, after each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models, or words of plans")
    parser.add_argument("--plans", action="store_true", help="what plans ask for")
    parser.add_argument("--again", action="store_true", help="also what the archive or the cache has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    arguments, started, values = parser.parse_args(), time.monotonic(), store.read_archive()
    models = ((name, partial(_trace, name)) for name in arguments.names or list_models())
    for name, trace in _plans(arguments.names) if arguments.plans else models:
        begun = time.monotonic()
        if begun - started > arguments.seconds:
            break
        with _asked_for(again=arguments.again) as asked, suppress(tw.TrainwrightError):
            trace()
        new = [
            (model, key)
            for model, traces in asked.items()
            for key in traces
            if arguments.again or key not in values.get(model, {})
        ]
        for model, key in new:
            values.setdefault(model, {})[key] = asked[model][key]
        if new:
            store.write_archive(store.SHIPPED, values)
            size = store.SHIPPED.stat().st_size / 2**20
            say(f"{name}: {len(new)} values in {time.monotonic() - begun:.1f} s; {size:.2f} MiB")


def _trace(name: str) -> None:
    full = _model(name)
    sections = AdapterSection(type="lora"), AdapterSection(type="lora", quantization="nf4")
    for model in (full, *map(full.add_adapter, sections)):
        read_model_facts(model)
        for request in requests(model):
            load_trace(request, REGIME)


def _plans(words: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    sizes = {name: read_model_facts(_model(name)).total for name in list_models()}
    plans: dict[str, Callable[[], object]] = {}
    for recipe in sorted(RECIPES.rglob("*.yaml")):
        for machine in (WITH_FLASH, WITHOUT_FLASH, None):
            name = f"{recipe.relative_to(RECIPES)} on {machine or 'this machine'}"
            plans[name] = partial(tw.plan, recipe, on=machine)
    for model in sorted((model for model, size in sizes.items() if size <= LARGEST), key=lambda model: sizes[model]):
        plans[f"{model} on {WITHOUT_FLASH}"] = partial(tw.plan, model=model, on=WITHOUT_FLASH)
    for name, plan in plans.items():
        if not words or any(word in name for word in words):
            yield name, plan


def _model(name: str) -> TracedModel:
    known = look_up_model(name)
    assert known is not None, f"{name} is not in the catalog"
    return TracedModel.of(known.config)


@contextmanager
def _asked_for(*, again: bool) -> Iterator[_Values]:
    """Collect the stored values that are read or written; ``again``: as if there were none."""
    values: _Values = {}
    models: dict[str, str] = {}
    plain_read, plain_write = store.read_value, store.write_value

    def read(key: str, configuration: str = "") -> Any:
        models[key] = store.name_model(configuration)
        if (value := None if again else plain_read(key, configuration)) is not None:
            values.setdefault(models[key], {})[key] = value
        return value

    def write(key: str, value: Any) -> None:
        values.setdefault(models[key], {})[key] = value
        plain_write(key, value)

    store.read_value, store.write_value = read, write
    try:
        yield values
    finally:
        store.read_value, store.write_value = plain_read, plain_write


if __name__ == "__main__":
    main()
