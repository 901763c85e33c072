"""Write the shipped traces: ``python bench/plan_traces.py [MODEL ...]``.

For every model of the catalog, or for those named: full training, LoRA and QLoRA on packs in bf16 on a GPU, with and
without recomputation. With ``--plans``: what plans ask for of the repository's recipes, and of models, the smallest
first, on a GPU without flash attention; with ``--seconds N`` as many as begin in that time. What the archive has
already of these versions of the libraries stays.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import trainwright as tw
from trainwright.planning.trace import store
from trainwright.planning.trace.catalog import known_model, known_models
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import model_facts, traced, traced_as
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
        yield traced_as(TraceRequest(model, Device("cuda"), "bf16", "packed", recompute), REGIME)


def main() -> None:
    """Trace what is missing and write the archive, after each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--plans", action="store_true", help="what plans ask for")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    arguments, started, values = parser.parse_args(), time.monotonic(), store.shipped()
    models = ((name, partial(_trace, name)) for name in arguments.models or known_models())
    for name, trace in _plans() if arguments.plans else models:
        begun = time.monotonic()
        if begun - started > arguments.seconds:
            break
        with _asked_for() as asked, suppress(tw.TrainwrightError):
            trace()
        new = [(model, key) for model, traces in asked.items() for key in traces.keys() - values.get(model, {}).keys()]
        for model, key in new:
            values.setdefault(model, {})[key] = asked[model][key]
        if new:
            store.ship(store.SHIPPED, values)
            size = store.SHIPPED.stat().st_size / 2**20
            say(f"{name}: {len(new)} values in {time.monotonic() - begun:.1f} s; {size:.2f} MiB")


def _trace(name: str) -> None:
    full = _model(name)
    sections = AdapterSection(type="lora"), AdapterSection(type="lora", quantization="nf4")
    for model in (full, *map(full.adapted, sections)):
        model_facts(model)
        for request in requests(model):
            traced(request, REGIME)


def _plans() -> Iterator[tuple[str, Callable[[], object]]]:
    for recipe in sorted(RECIPES.rglob("*.yaml")):
        for machine in (WITH_FLASH, WITHOUT_FLASH, None):
            yield f"{recipe.relative_to(RECIPES)} on {machine or 'this machine'}", partial(tw.plan, recipe, on=machine)
    sizes = {name: model_facts(_model(name)).total for name in known_models()}
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if sizes[name] <= LARGEST:
            yield f"{name} on {WITHOUT_FLASH}", partial(tw.plan, model=name, on=WITHOUT_FLASH)


def _model(name: str) -> TracedModel:
    known = known_model(name)
    assert known is not None, f"{name} is not in the catalog"
    return TracedModel.of(known.config)


@contextmanager
def _asked_for() -> Iterator[_Values]:
    """Collect the stored values that are read or written."""
    values: _Values = {}
    models: dict[str, str] = {}
    plain_read, plain_write = store.read, store.write

    def read(key: str, configuration: str = "") -> Any:
        models[key] = store.name_of(configuration)
        if (value := plain_read(key, configuration)) is not None:
            values.setdefault(models[key], {})[key] = value
        return value

    def write(key: str, value: Any) -> None:
        values.setdefault(models[key], {})[key] = value
        plain_write(key, value)

    store.read, store.write = read, write
    try:
        yield values
    finally:
        store.read, store.write = plain_read, plain_write


if __name__ == "__main__":
    main()
