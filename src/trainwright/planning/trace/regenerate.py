"""Write the shipped traces: ``python -m trainwright.planning.trace.regenerate [MODEL ...]``.

For every model of the catalog, or for those named: full training and LoRA on packs in bf16 on a GPU, with and without
recomputation. What the archive has already of these versions of the libraries stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from trainwright.planning.trace import store
from trainwright.planning.trace.catalog import known_model, known_models
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.traced import key_of, key_of_facts, model_facts, traced_as
from trainwright.recipe.sections.model import AdapterSection
from trainwright.utils.text import say

REGIME = Regime(chunked=True)


def requests(model: TracedModel) -> Iterator[TraceRequest]:
    """Yield what is shipped of a model."""
    for recompute in ("none", "full", "selective"):
        yield traced_as(TraceRequest(model, Device("cuda"), "bf16", "packed", recompute), REGIME)


def main(names: list[str]) -> None:
    """Trace what is missing and write the archive, after each model."""
    from trainwright.planning.trace.bound import trace_or_bound

    values: dict[str, Any] = store.shipped()
    for name in names or known_models():
        known = known_model(name)
        assert known is not None, f"{name} is not in the catalog"
        full, begun, added = TracedModel.of(known.config), time.monotonic(), 0
        for model in (full, full.adapted(AdapterSection(type="lora"))):
            if (key := key_of_facts(model)) not in values:
                values[key] = store.facts_as_json(model_facts(model))
            for request in requests(model):
                if (key := key_of(request, REGIME)) not in values:
                    values[key] = store.as_json(trace_or_bound(request, REGIME))
                    added += 1
        if added:
            store.ship(store.SHIPPED, values)
            size = store.SHIPPED.stat().st_size
            say(f"{name}: {added} traces in {time.monotonic() - begun:.1f} s; {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
