"""Compare the measurements of a run with its plan, and give the known reasons for differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from trainwright import text
from trainwright.machine.usage.causes import causes_of

# From this factor between measured and planned step time on, reasons are given.
_FAR = 1.5


class Compared(NamedTuple):
    """A measurement beside its prediction. ``is_outside``: it is outside of the plan's interval, and is coloured."""

    label: str
    words: str
    is_outside: bool


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[Compared]:
    """Yield everything that has both a prediction and a measurement.

    Args:
        predicted: see `Plan.predicted`; without its intervals, as from older plans, nothing is outside of one.
    """
    # The measured peak of a GPU counts tensors only, without its libraries.
    memory = "tensors_bytes" if "tensors_bytes" in predicted and "tensors_bytes" in measured else "memory_bytes"
    shown: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
        ("memory", memory, text.size, "memory"),
        ("step time", "step_time", lambda seconds: f"{seconds:.3g} s", "speed"),
        ("speed", "tokens_per_second", lambda rate: f"{text.count(rate)} tokens/s", "speed"),
    )
    for label, name, words, kind in shown:
        if name in measured and predicted.get(name):
            expected, found = predicted[name], measured[name]
            low, high = predicted.get(f"{kind}_low", 0.0), predicted.get(f"{kind}_high", math.inf)
            ratio = expected / max(found, 1e-9) if name == "step_time" else found / expected
            is_outside = not low <= ratio <= high
            off = _off(found / expected) + ", outside of the plan's interval" * is_outside
            yield Compared(label, f"{words(expected)} predicted, {words(found)} measured ({off})", is_outside)


def _off(ratio: float) -> str:
    if 0.5 <= ratio <= 2:
        return f"{ratio - 1:+.0%}".replace("%", " %")
    return f"{text.times(ratio)} times the plan"


def reasons_of(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    """Yield the known reasons why steps took much longer than planned; nothing if they did not."""
    expected, found = predicted.get("step_time"), measured.get("step_time")
    if not expected or found is None or found < _FAR * expected:
        return
    causes = causes_of(
        measured, elsewhere=measured.get("in_collectives", 0.0), planned_threads=predicted.get("threads")
    )
    yield from (cause.words for cause in causes)
    if measured.get("steps") == 0:
        yield "only the first steps were measured, which are slower than the rest"
    if predicted.get("calibrated") == 0 and not predicted.get("measured"):
        yield "the plan's times are from nominal rates; `trainwright machine calibrate` measures those of this machine"
