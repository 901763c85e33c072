"""When a run saves its state, by what that costs. Imports no torch."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from trainwright.recipe.sections.fields import parse_seconds

# The meaning of ``checkpoint.every: auto``.
_FIRST_SECONDS, _SECONDS, _SHARE = 120.0, 600.0, 0.02
_COSTS = 3  # of the last checkpoints: one that met a slow disk does not decide alone
# A checkpoint that is written for longer is waited for: if the disk is stuck, that is reported as a hang.
_STUCK_SECONDS = 3600.0
# The first checkpoint of a launch measures what one costs. A launch that fails before it has gained nothing, and would
# fail there again and again.
_FIRST_OF_BETWEEN = 0.1
_RATES = 20  # of the last steps, with which those beside a checkpoint are compared


class Saving:
    """Decide after each step whether a checkpoint is due. Time is measured by rank 0's clock for all ranks.

    Args:
        every: ``checkpoint.every`` of the recipe.
        between: ``faults.mean_time_between`` of the recipe.
    """

    def __init__(
        self, every: int | str | None, between: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every = every
        self._between = None if between is None else parse_seconds(between)
        self._clock = clock
        self._since = clock()
        self._interval = parse_seconds(every) if isinstance(every, str) and every != "auto" else None
        self._first = (
            _FIRST_SECONDS if self._between is None else min(_FIRST_SECONDS, self._between * _FIRST_OF_BETWEEN)
        )
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._failures = 0  # of the last checkpoints, in a row
        if every == "auto":
            self._interval = self._first

    def is_due(self, step: int, writing: bool = False) -> bool:
        """Return whether to save after ``step``; ``writing``: whether a checkpoint is still being written.

        ``auto`` waits for it without holding up training.
        """
        if writing and self._every == "auto" and self._clock() - self._since < _STUCK_SECONDS:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._interval is not None and self._clock() - self._since >= self._interval

    def started(self) -> None:
        """Record that a checkpoint is written from now on."""
        self._since = self._clock()

    def record_seconds(self, seconds: float) -> None:
        """Record that a checkpoint was written; training has waited ``seconds`` for it."""
        self._failures = 0
        self._costs.append(seconds)
        if self._every == "auto":
            self._interval = self._usual(statistics.median_low(self._costs))

    def failed(self, seconds: float) -> None:
        """Record that a checkpoint was not written, for which training has waited ``seconds``.

        ``auto`` tries again soon, and later each time, until failing costs no more than writing may.
        """
        self._failures += 1
        if self._every == "auto":
            self._since = self._clock()
            later = self._first * 2.0 ** min(self._failures - 1, 30)
            self._interval = min(later, max(self._first, self._usual(seconds)))

    def _usual(self, cost: float) -> float:
        return max(_SECONDS, cost / _SHARE) if self._between is None else compute_best_interval(cost, self._between)


class SlowedSteps:
    """How much longer steps take beside a checkpoint that is being written than without one."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_RATES)  # tokens per second of steps without one
        self._seconds = 0.0

    def add(self, seconds: float, tokens: int, *, beside: bool) -> float:
        """Count a step; return by how many seconds it was slower, negative if it was faster."""
        if not beside:
            self._rates.append(tokens / seconds)
            return 0.0
        more = seconds - tokens / statistics.median(self._rates) if self._rates else 0.0
        self._seconds += more
        return more

    def take(self) -> float:
        """Return the seconds since the last call; 0 if the steps were faster, as by chance."""
        seconds, self._seconds = self._seconds, 0.0
        return max(0.0, seconds)


def compute_best_interval(cost: float, between: float) -> float:
    """Return the seconds between checkpoints that minimize the time lost to them and to repeated steps.

    The estimate of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006),
    equation 37, for failures at random.

    Args:
        cost: seconds that training waits for a checkpoint.
        between: mean seconds between failures.
    """
    if cost >= 2 * between:
        return between
    ratio = cost / (2 * between)
    return math.sqrt(2 * cost * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def explain_auto_interval(between: str | None) -> str:
    """Return the description of ``checkpoint.every: auto`` for a plan; ``between``: ``faults.mean_time_between``."""
    if between is not None:
        return (
            "checkpoint.every auto: the interval that loses the least time with a failure every "
            f"{between} on average (faults.mean_time_between), from the measured cost of a checkpoint"
        )
    return (
        f"checkpoint.every auto: after {_FIRST_SECONDS / 60:.0f} min, then every {_SECONDS / 60:.0f} min, or less "
        f"often so that saving takes at most {_SHARE:.0%} of the time"
    )
