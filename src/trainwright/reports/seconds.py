"""Where the time of a run went, from its events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trainwright.observe.reader import EventRecord
from trainwright.reports.figures import RunFigures

# What an event's own seconds belong to.
_TAKES = {"evaluate": ("evaluation", "seconds"), "checkpoint": ("checkpoints", "blocked_seconds")}


def seconds_by_kind(run: RunFigures) -> dict[str, float]:
    """Return the seconds since the run began by what they were used for; only kinds that took any.

    ``steps`` are those that count; ``repeated`` were done again after a fault; ``paused`` is between launches;
    ``other`` is start-up, generation, and what has no event.
    """
    events = [event for event in run.everything if isinstance(event.get("time"), (int, float))]
    if not events:
        return {}
    found = dict.fromkeys(("steps", "repeated", "evaluation", "checkpoints", "paused", "other"), 0.0)
    found["steps"] = _sum(run.steps, "step_time")
    found["repeated"] = _sum([event for event in events if event["event"] == "step"], "step_time") - found["steps"]
    for event in events:
        if event["event"] in _TAKES:
            kind, field = _TAKES[event["event"]]
            found[kind] += float(event.get(field, 0.0))
    for before, event in pairwise(events):
        if event["event"] == "start":
            found["paused"] += max(0.0, event["time"] - before["time"])
    spent = events[-1]["time"] - events[0]["time"]
    found["other"] = spent - sum(found.values())
    return {kind: seconds for kind, seconds in found.items() if seconds > 0.005}


def _sum(events: Sequence[EventRecord], field: str) -> float:
    return sum(float(event.get(field, 0.0)) for event in events)
