"""Read a run's events as one uninterrupted history, its recipe, and its plan beside what was measured.

The run may be anybody's.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainwright.engine.events import LONGEST_LINE, parse_event
from trainwright.errors import RequestError
from trainwright.machine.slowdowns import find_causes
from trainwright.recipe.yaml_text import parse_mapping
from trainwright.utils import text
from trainwright.utils.paths import open_inside

EventRecord = dict[str, Any]

# Other events about what a launch finds may precede its start event.
_WORK = ("step", "evaluate", "generate", "checkpoint", "finish")
# What a stop interrupted after the step of its checkpoint, by `pending` of the `start` event.
_PENDING = {"evaluation": ("evaluate", "generate"), "generation": ("generate",)}
_MOST_DAMAGE = 100  # lines that are described
# Of a recipe that was written into a run: bytes, and keys and values. To read more takes seconds.
_RECIPE_BYTES, _RECIPE_VALUES = 2**18, 5000


def read_events(path: Path) -> list[EventRecord]:
    """Return the events of `events.jsonl` in order, without those that a resumed run repeated.

    A run that was killed at step 57 and resumed from the checkpoint of step 40 has steps 41 to 57 twice; only the
    second ones are returned. An incomplete last line is skipped. Raises OSError if there is no such file.
    """
    return select_history(list(_iterate_events(path, [])))


@dataclass(frozen=True)
class RunEvents:
    """A run's events.

    Attributes:
        history: without those that a resumed run repeated.
        everything: as they were written.
        damage: descriptions of the first lines that could not be read; the last line of a run that is writing is not
            one.
    """

    history: list[EventRecord]
    everything: list[EventRecord]
    damage: list[str]


def read_log(path: Path) -> RunEvents:
    """Return the events of `events.jsonl`, and what could not be read; nothing if there is no such file."""
    damage: list[str] = []
    try:
        all_events = list(_iterate_events(path, damage))
    except FileNotFoundError:
        all_events = []
    except OSError as error:
        all_events, damage = [], [f"{path.name}: {error.strerror}"]
    return RunEvents(select_history(all_events), all_events, damage)


def read_recipe(run: Path) -> dict[str, Any]:
    """Return the recipe of a run as plain values. Raises RequestError if it cannot be read."""
    name = "recipe.yaml"
    try:
        with open_inside(run, name) as file:
            content = file.read(_RECIPE_BYTES + 1)
        if len(content) > _RECIPE_BYTES:
            raise RequestError(f"{name}: is larger than {_RECIPE_BYTES // 1024} KiB, too large for a recipe")
        return parse_mapping(content.decode(), name, max_values=_RECIPE_VALUES, has_aliases=False).values
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{name}: is not UTF-8 text") from None


def read_status(run: Path) -> str:
    """Return ``finished``, ``stopped``, or ``unfinished`` for a run that is training, was killed or has failed."""
    events = read_log(run / "events.jsonl").history
    last = next((event for event in reversed(events) if event["event"] in ("start", "finish")), None)
    return str(last.get("status", "finished")) if last is not None and last["event"] == "finish" else "unfinished"


@dataclass(frozen=True)
class EarlierEvents:
    """The earlier launches of a run: the ``events`` that still count, and the ``seconds`` of training."""

    events: list[EventRecord]
    seconds: float


def read_earlier(path: Path, start: EventRecord) -> EarlierEvents:
    """Return what precedes a run's newest ``start`` event; empty if there is no such file."""
    try:
        lines = [event for event in _iterate_events(path, []) if event["time"] < start.get("time", math.inf)]
    except OSError:
        return EarlierEvents([], 0.0)
    return EarlierEvents(select_history([*lines, start])[:-1], sum(_iterate_spans(lines)))


def _iterate_spans(events: Iterable[EventRecord]) -> Iterator[float]:
    """Yield the seconds that each launch trained, up to its last event."""
    start = end = None
    for event in events:
        if event["event"] == "start":
            if start is not None and end is not None:
                yield end - start
            start = end = event["time"]
        elif event["event"] in _WORK and start is not None:
            end = event["time"]
    if start is not None and end is not None:
        yield end - start


def select_history(events: Sequence[EventRecord]) -> list[EventRecord]:
    """Return the events without those that are repeated after a later ``start`` or ``rewind``."""
    history: list[EventRecord] = []
    # From the end, so that it takes one pass however often the run went back: the last step of each kind that counts.
    last: dict[str, float] = defaultdict(lambda: math.inf)
    last_of_any = math.inf
    for event in reversed(events):
        step = event.get("step")
        if not isinstance(step, int) or step <= min(last_of_any, last[event["event"]]):
            history.append(event)
        if event["event"] in ("start", "rewind"):
            last_valid, repeated_kinds = _find_restart_point(event)
            last_of_any = min(last_of_any, last_valid)
            for kind in repeated_kinds:
                last[kind] = min(last[kind], last_valid - 1)
    return history[::-1]


def describe_precision(start: EventRecord) -> str:
    """Return the precision of a `start` event in words."""
    precision = str(start.get("mixed_precision")).replace("no", "fp32")
    if start.get("float8", "no") != "no":
        precision += f", products of blocks in float8 ({start['float8']})"
    return f"{precision}, fp32 products in TF32" if start.get("tf32") else precision


def has_lost_steps(before: EventRecord, after: EventRecord) -> bool:
    """Return whether steps are missing between two ``step`` events."""
    return int(after["step"]) > int(before["step"]) + 1


def find_curve_part(breaks: Sequence[int], step: int) -> int:
    """Return in which part of a curve a step is: how many of ``breaks``, before each of which steps are missing, are up
    to it. A curve has a gap between two points of different parts.
    """
    return bisect_right(breaks, step)


def find_resumed_step(start: EventRecord) -> int | None:
    """Return the step a `start` event resumes from, a number or in a checkpoint's path; None for a fresh run."""
    value = start.get("resumed_from")
    if value is None or isinstance(value, int):
        return value
    number = re.search(r"(?<!\d)(\d{1,15})/?$", str(value))
    return int(number.group(1)) if number else None


def is_superseded(event: EventRecord, start: EventRecord) -> bool:
    """Return whether an event is repeated after a later ``start`` or ``rewind`` event."""
    last_valid, repeated_kinds = _find_restart_point(start)
    step = event.get("step")
    return isinstance(step, int) and (step > last_valid or (step == last_valid and event["event"] in repeated_kinds))


def _find_restart_point(start: EventRecord) -> tuple[int, Sequence[str]]:
    """Return the last step that counts after a ``start`` or ``rewind``, and which kinds are written again for it."""
    # Not resumed although the file has earlier events: the run was killed before the first checkpoint.
    last_step = find_resumed_step(start)
    return -1 if last_step is None else last_step, _PENDING.get(str(start.get("pending")), ())


def _iterate_events(path: Path, damage: list[str]) -> Iterator[EventRecord]:
    with open_inside(path.parent, path.name) as file:
        for number, line in enumerate(iterate_bounded_lines(file), 1):
            if len(line) > LONGEST_LINE:
                damage.append(f"{path.name} line {number} is too long; what follows is not read")
            elif (event := parse_event(line.decode("utf-8", "replace"))) is not None:
                yield event
            elif line.endswith(b"\n") and len(damage) < _MOST_DAMAGE:
                damage.append(f"{path.name} line {number} is damaged")


def iterate_bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file up to one that is longer than ``LONGEST_LINE``, of which the beginning is the last."""
    while line := file.readline(LONGEST_LINE + 1):
        yield line
        if len(line) > LONGEST_LINE:
            return


# From this factor between measured and planned step time on, reasons are given.
_FAR_FROM_PLAN = 1.5


class Compared(NamedTuple):
    """A measurement beside its prediction. ``is_outside``: it is outside of the plan's interval, and is coloured."""

    label: str
    words: str
    is_outside: bool


def compare_with_plan(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[Compared]:
    """Yield everything that has both a prediction and a measurement.

    Args:
        predicted: see `RunPlan.predicted`; without its intervals, as from older plans, nothing is outside of one.
    """
    # The measured peak of a GPU counts tensors only, without its libraries.
    memory = "tensors_bytes" if "tensors_bytes" in predicted and "tensors_bytes" in measured else "memory_bytes"
    quantities: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
        ("memory", memory, text.format_bytes, "memory"),
        ("step time", "step_time", lambda seconds: f"{seconds:.3g} s", "speed"),
        ("speed", "tokens_per_second", lambda rate: f"{text.format_count(rate)} tokens/s", "speed"),
    )
    for label, name, words, kind in quantities:
        if name in measured and predicted.get(name):
            expected, actual = predicted[name], measured[name]
            low, high = predicted.get(f"{kind}_low", 0.0), predicted.get(f"{kind}_high", math.inf)
            ratio = expected / max(actual, 1e-9) if name == "step_time" else actual / expected
            is_outside = not low <= ratio <= high
            off = _format_deviation(actual / expected) + ", outside of the plan's interval" * is_outside
            yield Compared(label, f"{words(expected)} predicted, {words(actual)} measured ({off})", is_outside)


def _format_deviation(ratio: float) -> str:
    if 0.5 <= ratio <= 2:
        return f"{ratio - 1:+.0%}".replace("%", " %")
    return f"{text.format_ratio(ratio)} times the plan"


def explain_slow_steps(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Iterator[str]:
    """Yield the known reasons why steps took much longer than planned; nothing if they did not."""
    expected, actual = predicted.get("step_time"), measured.get("step_time")
    if not expected or actual is None or actual < _FAR_FROM_PLAN * expected:
        return
    causes = find_causes(
        measured, elsewhere=measured.get("in_collectives", 0.0), planned_threads=predicted.get("threads")
    )
    yield from (cause.words for cause in causes)
    if measured.get("steps") == 0:
        yield "only the first steps were measured, which are slower than the rest"
    if predicted.get("calibrated") == 0 and not predicted.get("measured"):
        yield "the plan's times are from nominal rates; `trainwright machine calibrate` measures those of this machine"
