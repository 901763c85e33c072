"""Estimate the remaining time of a run: its steps, and what happens between and after them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainwright.observe.reader import EventRecord

# The events of one evaluation round: the evaluation and the samples after it.
_ROUND_OF = {"evaluate": "evaluation", "generate": "evaluation", "checkpoint": "checkpoint"}


class Remaining:
    """Estimate the seconds left, from the durations of steps, evaluations with samples, and checkpoints so far.

    The final export is assumed to take as long as a checkpoint. What has not happened yet counts as zero.

    Args:
        start: the number of steps, and the intervals of evaluation and checkpoints, if known.
        past: the earlier launches of the run.
    """

    def __init__(self, start: EventRecord, past: Sequence[EventRecord] = ()) -> None:
        self.total: int = start.get("max_steps") or 0
        self._every = {"evaluation": start.get("evaluate_every"), "checkpoint": start.get("checkpoint_every")}
        self._seconds = {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._count = {"step": 0, "evaluation": 0, "checkpoint": 0}
        for event in past:
            if event["event"] in ("evaluate", "checkpoint"):
                self._add(_ROUND_OF[event["event"]], event.get("seconds", 0.0))
        self._first: int | None = None
        self._saved = 0
        self._round: object = None
        self._last = time.monotonic()

    def see(self, event: EventRecord) -> None:
        """Attribute the time since the previous event to this one. Call for every event as it happens."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        kind, step = event["event"], event.get("step")
        if kind == "step":
            if self._first is None:  # slower than the rest, and not representative
                self._first = step
            else:
                self._add("step", seconds)
        elif kind in _ROUND_OF:
            # In a round of several events, the first one increases the count and all add their time.
            self._add(_ROUND_OF[kind], seconds, count=(_ROUND_OF[kind], step) != self._round)
            self._round = _ROUND_OF[kind], step
            self._saved += kind == "checkpoint"

    def after(self, step: int, step_time: float) -> float:
        """Return the estimate right after ``step``. ``step_time`` is used until two steps have been seen."""
        each = self._mean("step") if self._count["step"] else step_time
        evaluations = self._to_come("evaluation", step)
        checkpoints = max(self._to_come("checkpoint", step), self._by_rate(step)) + 1  # plus the export
        return (
            (self.total - step) * each + evaluations * self._mean("evaluation") + checkpoints * self._mean("checkpoint")
        )

    def _to_come(self, kind: str, step: int) -> int:
        """Return the number of rounds due after ``step``, including that of ``step`` itself and the one at the end."""
        every = self._every[kind]
        if not isinstance(every, int) or every < 1:
            return 1
        due = self.total // every - (step - 1) // every
        return due + (self.total % every != 0)

    def _by_rate(self, step: int) -> float:
        """Return the number of checkpoints to come at the rate so far: by time, or for being the best."""
        done = step - self._first + 1 if self._first is not None else 0
        return self._saved / done * (self.total - step) if done > 0 else 0.0

    def _add(self, kind: str, seconds: float, *, count: bool = True) -> None:
        self._seconds[kind] += seconds
        self._count[kind] += count

    def _mean(self, kind: str) -> float:
        return self._seconds[kind] / self._count[kind] if self._count[kind] else 0.0
