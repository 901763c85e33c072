"""Read a run's events as one uninterrupted history."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EventRecord = dict[str, Any]

# Other events about what a launch finds may precede its start event.
_WORK = ("step", "evaluate", "generate", "checkpoint", "finish")
# What a stop interrupted after the step of its checkpoint, by `pending` of the `start` event.
_PENDING = {"evaluation": ("evaluate", "generate"), "generation": ("generate",)}
_NOT_JSON = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read_events(path: Path) -> list[EventRecord]:
    """Return the events of `events.jsonl` in order, without those that a resumed run repeated.

    A run that was killed at step 57 and resumed from the checkpoint of step 40 has steps 41 to 57 twice; only the
    second ones are returned. An incomplete last line is skipped. Raises OSError if there is no such file.
    """
    return _history(_lines(path, []))


@dataclass(frozen=True)
class EventLog:
    """A run's events.

    Attributes:
        history: without those that a resumed run repeated.
        everything: as they were written.
        damage: descriptions of the lines that could not be read; the last line of a run that is writing is not one.
    """

    history: list[EventRecord]
    everything: list[EventRecord]
    damage: list[str]


def read_log(path: Path) -> EventLog:
    """Return the events of `events.jsonl`, and what could not be read; nothing if there is no such file."""
    damage: list[str] = []
    try:
        everything = list(_lines(path, damage))
    except FileNotFoundError:
        everything = []
    except OSError as error:
        everything, damage = [], [f"{path.name}: {error.strerror}"]
    return EventLog(_history(everything), everything, damage)


def status_of(run: Path) -> str:
    """Return ``finished``, ``stopped``, or ``unfinished`` for a run that is training, was killed or has failed."""
    events = read_log(run / "events.jsonl").history
    last = next((event for event in reversed(events) if event["event"] in ("start", "finish")), None)
    return str(last["status"]) if last is not None and last["event"] == "finish" else "unfinished"


@dataclass(frozen=True)
class EarlierEvents:
    """The earlier launches of a run: the ``events`` that still count, and the ``seconds`` of training."""

    events: list[EventRecord]
    seconds: float


def read_earlier(path: Path, start: EventRecord) -> EarlierEvents:
    """Return what precedes a run's newest ``start`` event; empty if there is no such file."""
    try:
        lines = [event for event in _lines(path, []) if event.get("time", 0.0) < start.get("time", float("inf"))]
    except OSError:
        return EarlierEvents([], 0.0)
    return EarlierEvents(_history([*lines, start])[:-1], sum(_spans(lines)))


def _spans(events: Iterable[EventRecord]) -> Iterator[float]:
    """Yield the seconds that each launch trained, up to its last event."""
    begun = ended = None
    for event in events:
        if event["event"] == "start":
            if begun is not None and ended is not None:
                yield ended - begun
            begun = ended = event.get("time")
        elif event["event"] in _WORK and begun is not None:
            ended = event.get("time", ended)
    if begun is not None and ended is not None:
        yield ended - begun


def _history(events: Iterable[EventRecord]) -> list[EventRecord]:
    history: list[EventRecord] = []
    for event in events:
        if event["event"] in ("start", "rewind"):
            history = [past for past in history if not superseded(past, event)]
        history.append(event)
    return history


def precision_of(start: EventRecord) -> str:
    """Return the precision of a `start` event in words."""
    computed = str(start.get("mixed_precision")).replace("no", "fp32")
    return f"{computed}, fp32 products in TF32" if start.get("tf32") else computed


def resumed_step(start: EventRecord) -> int | None:
    """Return the step a `start` event resumes from, a number or in a checkpoint's path; None for a fresh run."""
    value = start.get("resumed_from")
    if value is None or isinstance(value, int):
        return value
    number = re.search(r"(\d+)/?$", str(value))
    return int(number.group(1)) if number else None


def superseded(event: EventRecord, start: EventRecord) -> bool:
    """Return whether an event is repeated after a later ``start`` or ``rewind`` event."""
    # Not resumed although the file has earlier events: the run was killed before the first checkpoint.
    resumed = resumed_step(start)
    kept = -1 if resumed is None else resumed
    # Some kinds of events of step `kept` itself are written again.
    again = _PENDING.get(str(start.get("pending")), ())
    step = event.get("step")
    return isinstance(step, int) and (step > kept or (step == kept and event["event"] in again))


def _lines(path: Path, damage: list[str]) -> Iterator[EventRecord]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and "event" in event:
                yield restored_numbers(event) if event["event"] in ("step", "evaluate") else event
            elif line.endswith("\n"):
                damage.append(f"{path.name} line {number} is damaged")


def restored_numbers(event: EventRecord) -> EventRecord:
    """Convert the names of NaN and infinity, which JSON does not have, back to numbers."""
    restored: EventRecord = {}
    for key, value in event.items():
        if isinstance(value, dict):
            restored[key] = restored_numbers(value)
        else:
            restored[key] = _NOT_JSON.get(value, value) if isinstance(value, str) else value
    return restored
