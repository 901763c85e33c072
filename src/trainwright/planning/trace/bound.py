"""What a plan assumes of a model that cannot be traced: its parameters, and a bound for its activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainwright.errors import RequestError
from trainwright.planning.trace.batch import BASIS
from trainwright.planning.trace.build import Built, build, facts_of_model
from trainwright.planning.trace.record import EMBEDDING
from trainwright.planning.trace.request import Device, Regime, TracedModel, TraceRequest
from trainwright.planning.trace.tracing import parameters_of, trace
from trainwright.planning.trace.units import (
    ModelFacts,
    ModelTrace,
    Moment,
    Operation,
    PassTrace,
    Size,
    TracedParameter,
    UnitTrace,
)

# Tensors of the width of a matrix's result that are kept for it: the result, its activation, and what is between them.
_KEPT = 4


def trace_or_bound(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    """Trace the model of a request; if its code cannot run on tensors without data, return a bound.

    Raises:
        RequestError: the model cannot be made, as in a run.
    """
    try:
        return trace(request, regime)
    except RequestError:
        raise
    except Exception as error:  # whatever the code of a model raises
        line = " ".join(str(error).split())[:120]
        return _bound(request, build(request, regime), f"{type(error).__name__}: {line}")


def without_passes(model: TracedModel) -> ModelTrace[Size]:
    """Return a model's units with their parameters alone: its modules are made, without memory, but not run.

    Raises:
        RequestError: the model cannot be made, as in a run.
    """
    nothing = PassTrace[Size]((), ())
    built = build(TraceRequest(model, Device("cpu"), "fp32"), Regime())
    return _of_units(
        built, lambda kind, parameters: UnitTrace(parameters, nothing, nothing, nothing), facts_of_model(model)
    )


def _bound(request: TraceRequest, built: Built, failed: str) -> ModelTrace[Size]:
    facts = dataclasses.replace(facts_of_model(request.model), failed=failed)
    share = facts.active / facts.total
    return _of_units(built, lambda kind, parameters: _unit(request, kind, parameters, share, facts), facts)


def _of_units(
    built: Built, unit_of: Callable[[str, tuple[TracedParameter, ...]], UnitTrace[Size]], facts: ModelFacts
) -> ModelTrace[Size]:
    """Return the trace of a model whose units are equal if their parameters are."""
    embedding: Any = built.lm.model.get_input_embeddings().weight
    blocks = len(built.blocks)
    kinds = {EMBEDDING: "embedding", blocks: "head"}
    keys = [(kinds.get(unit, "block"), listed) for unit, listed in sorted(parameters_of(built, [embedding]).items())]
    units = {key: unit_of(*key) for key in dict.fromkeys(keys)}
    numbers = {key: number for number, key in enumerate(units)}
    return ModelTrace(tuple(units.values()), tuple(numbers[key] for key in keys), facts)


def _unit(
    request: TraceRequest,
    kind: str,
    parameters: Sequence[TracedParameter],
    share: float,
    facts: ModelFacts,
) -> UnitTrace[Size]:
    """Return the bound of a unit: of a block all results of its matrices and all scores of its attention."""
    width, hidden, heads, vocabulary = request.width, facts.hidden, facts.heads, facts.vocabulary
    experts = max(1, facts.experts_per_token)
    matrices = [p for p in parameters if len(p.shape) >= 2] if kind != "embedding" else []
    results = sum(max(p.shape[-2:]) * (experts if len(p.shape) > 2 else 1) for p in matrices)
    kept = {"tokens": width * hidden * (2 if kind == "block" else 1)}
    work = {"tokens": width * hidden}
    if kind == "block":
        kept["tokens"] += _KEPT * width * results
        kept["pairs"] = (4 + width) * heads
        work = {name: 2 * size for name, size in kept.items()}
    if kind == "head":
        work |= {"chunk": 2 * width * vocabulary, "block": 8 * vocabulary, "1": 4 * vocabulary * hidden}
    both = {name: kept.get(name, 0) + work.get(name, 0) for name in (*kept, *work)}
    forward = PassTrace[Size]((Moment("", (_size(both),), _size(kept)),), _products(matrices, kind, share, width, 1))
    moments = tuple(Moment[Size](p.name, (_size(work),), ()) for p in parameters if p.trainable)
    gone = {name: -size for name, size in kept.items()}
    backward = PassTrace[Size](
        (*moments, Moment("", (_size(work),), _size(gone))), _products(matrices, kind, share, width, 2)
    )
    evaluation = PassTrace[Size]((Moment("", (_size(both),), ()),), forward.operations)
    return UnitTrace(tuple(parameters), forward, backward, evaluation)


def _products(
    matrices: Sequence[TracedParameter], kind: str, share: float, width: int, times: int
) -> tuple[Operation[Size], ...]:
    rows = "targets" if kind == "head" else "tokens"
    made = []
    for p in matrices:
        active = math.prod(p.shape) * (share if "experts" in p.name else 1.0)
        n, k = p.shape[-2:]
        read = _size({"1": width * p.numel, rows: width * k})
        one, flops, written = _size({"1": 1}), _size({rows: 2 * active * times}), _size({rows: width * n})
        m, launches = _size({rows: 1}), _size({"1": times})
        made.append(
            Operation[Size](
                "product", p.name, launches, m, _size({"1": n}), _size({"1": k}), one, flops, read, written, width
            )
        )
    return tuple(made)


def _size(terms: Mapping[str, float]) -> Size:
    return tuple(terms.get(name, 0) for name in BASIS)
