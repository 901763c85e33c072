"""Write the shipped traces: ``python bench/plan_traces.py [MODEL ...]``.

For every model of the catalog, or for those named: full training, LoRA and QLoRA on packs in bf16 on a GPU, with and
without recomputation. What the archive has already of these versions of the libraries stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from trainwright.planning.trace import store
from trainwright.planning.trace.catalog import known_model, known_models
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import key_of, key_of_modules, traced_as
from trainwright.recipe.sections.model import AdapterSection
from trainwright.utils.text import say

REGIME = Regime(chunked=True)


def requests(model: TracedModel) -> Iterator[TraceRequest]:
    """Yield what is shipped of a model."""
    for recompute in ("none", "full", "selective"):
        yield traced_as(TraceRequest(model, Device("cuda"), "bf16", "packed", recompute), REGIME)


def adapted(model: TracedModel) -> tuple[TracedModel, ...]:
    """Return a model as it is trained in full, with LoRA and with QLoRA."""
    sections = AdapterSection(type="lora"), AdapterSection(type="lora", quantization="nf4")
    return model, *map(model.adapted, sections)


def main(names: list[str]) -> None:
    """Trace what is missing and write the archive, after each model."""
    from trainwright.planning.trace.tracing import trace_or_bound, without_passes

    values = {model.configuration: dict(store.shipped(model.configuration)) for model in map(_model, known_models())}
    for name in names or known_models():
        full, begun = _model(name), time.monotonic()
        of_model = values.setdefault(full.configuration, {})
        before = len(of_model)
        for model in adapted(full):
            if (key := key_of_modules(model)) not in of_model:
                of_model[key] = store.as_json(without_passes(model))
            for request in requests(model):
                if (key := key_of(request, REGIME)) not in of_model:
                    of_model[key] = store.as_json(trace_or_bound(request, REGIME))
        if len(of_model) > before:
            store.ship(store.SHIPPED, {configuration: some for configuration, some in values.items() if some})
            size = store.SHIPPED.stat().st_size
            say(f"{name}: {len(of_model) - before} values in {time.monotonic() - begun:.1f} s; {size / 2**20:.2f} MiB")


def _model(name: str) -> TracedModel:
    known = known_model(name)
    assert known is not None, f"{name} is not in the catalog"
    return TracedModel.of(known.config)


if __name__ == "__main__":
    main(sys.argv[1:])
