"""Blocks of unknown families: traced once with fake tensors, and cached.

The model is created from its configuration without memory, and its first block runs forward and backward on fake
tensors of three shapes. Every allocation is then a size that grows with the tokens and with the pairs of a sequence's
tokens, and the same allocations and releases are replayed for any other shape. Traces are kept by fingerprint of the
configuration in Trainwright's cache; torch is imported to trace, not to read a trace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trainwright.machine.cache import cache_root, try_write

if TYPE_CHECKING:
    from trainwright.planning.architectures.tracing import TraceEvent
    from trainwright.planning.operations.shapes import BatchShape

# Rows and tokens per row: three shapes for three unknowns.
_SHAPES = ((2, 64), (4, 64), (2, 128))
_FORMAT = 2


def layout(config: str) -> dict[str, Any]:
    """Return sizes and parameters of the model of a configuration (JSON): see ``tracing.layout_of``.

    Raises:
        TraceError: the model cannot be created, or its parts cannot be identified.
    """
    return _cached(config, "layout", lambda tracing: tracing.layout_of(json.loads(config)))


def numbers(config: str, recompute: str, width: int, batch: BatchShape, input_wants: bool) -> dict[str, Any]:
    """Return the fields of ``passes.Pass`` that are bytes of memory, for the first block.

    Raises:
        TraceError: the block cannot be traced.
    """
    kind = f"{recompute}-{width}-{'packed' if batch.packed else 'masked' if batch.masked else 'rows'}-{input_wants}"
    wanted = recompute, width, batch.packed, batch.masked, input_wants
    found = _cached(
        config, kind, lambda tracing: _fitted([tracing.timeline(json.loads(config), *wanted, *s) for s in _SHAPES])
    )
    tokens = batch.tokens
    squares = sum(n * length**2 for length, n in batch.sequences) if batch.packed else batch.rows * batch.length**2
    sized = {name: _sized(events, tokens, squares) for name, events in found.items()}
    return _replayed(sized)


class TraceError(Exception):
    """A model cannot be traced; the message gives the reason."""


@lru_cache(maxsize=256)
def _read(path: str) -> Any:
    return json.loads(open(path, encoding="utf-8").read())


def _cached(config: str, kind: str, make: Any) -> Any:
    key = json.dumps([_FORMAT, config, kind, version("transformers"), version("torch")])
    file = cache_root() / "traces" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        return _read(str(file))
    except (OSError, ValueError):
        pass
    from trainwright.planning.architectures import tracing

    try:
        made = make(tracing)
    except TraceError:
        raise
    except Exception as error:  # code of any model
        family = json.loads(config).get("model_type")
        raise TraceError(f"{family}: {type(error).__name__}: {str(error).splitlines()[:1]}") from error
    try_write(file, json.dumps(made))
    return made


def _fitted(runs: list[Mapping[str, list[TraceEvent]]]) -> dict[str, list[TraceEvent]]:
    """Fit the event sizes of three runs as [a, b, c]: a + b * tokens + c * pairs, in bytes."""
    fitted: dict[str, list[TraceEvent]] = {}
    for name in runs[0]:
        lines = [run[name] for run in runs]
        if len({json.dumps([event[:2] for event in line]) for line in lines}) > 1:
            raise TraceError("its operations depend on the shape of the batch")
        fitted[name] = [
            [*events[0][:2], _solved([event[2] for event in events])] for events in zip(*lines, strict=True)
        ]
    return fitted


def _solved(sizes: list[int]) -> list[float]:
    tokens = [rows * length for rows, length in _SHAPES]
    squares = [rows * length**2 for rows, length in _SHAPES]
    of_squares = (sizes[2] - sizes[1]) / (squares[2] - squares[1])
    of_tokens = (sizes[1] - sizes[0] - of_squares * (squares[1] - squares[0])) / (tokens[1] - tokens[0])
    return [sizes[0] - of_tokens * tokens[0] - of_squares * squares[0], of_tokens, of_squares]


def _sized(events: list[TraceEvent], tokens: int, squares: int) -> list[TraceEvent]:
    return [[kind, what, round(a + b * tokens + c * squares)] for kind, what, (a, b, c) in events]


def _replayed(lines: Mapping[str, list[TraceEvent]]) -> dict[str, Any]:
    """Return the fields of ``passes.Pass`` from events.

    Events are allocations (+), releases (-) and gradients (a parameter's name), with bytes or numbers.
    """
    evaluation_peak, forward_peak, live = 0, 0, 0
    for kind, _, size in lines["evaluation"]:
        live += size if kind == "+" else -size
        evaluation_peak = max(evaluation_peak, live)
    live = 0
    for kind, _, size in lines["forward"]:
        if kind == "end":
            break
        live += size if kind == "+" else -size
        forward_peak = max(forward_peak, live)
    ends = {what: size for kind, what, size in lines["forward"] if kind == "end"}
    kept = live - ends["output"]
    moments, peak = [], 0
    live += ends["output"]  # the incoming gradient
    peak = live
    for kind, what, size in lines["backward"]:
        if kind == "gradient":
            live -= size
            moments.append((what, size // ends["width"], peak, live))
            peak = live
            continue
        live += size if kind == "+" else -size
        peak = max(peak, live)
    return {
        "forward_peak": forward_peak,
        "kept": kept,
        "keeps_input": bool(ends["keeps_input"]),
        "output": ends["output"],
        "moments": moments,
        "backward_peak": peak,
        "evaluation_peak": evaluation_peak,
    }
