"""The ledger of a run: every second of every rank, by what it was used for.

Each rank appends a line to `ledger/rank-<r>.jsonl` every few seconds, from a thread beside the training: the seconds of
this launch so far by category. A rank that is killed loses those since its last line, which then count as stopped.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainwright.engine.event_reader import EventRecord, is_superseded, iterate_bounded_lines
from trainwright.machine.usage import UsageSampler, compute_process_age
from trainwright.run.observers.hooks import ObservedRank
from trainwright.utils.heartbeat import FINISHED, Heartbeat, Use
from trainwright.utils.paths import list_files_inside, open_inside

DIRECTORY = "ledger"
FORMAT = 1
EXCHANGE, WAITING, REPEATED, STOPPED, OTHER = "exchange", "waiting for ranks", "repeated", "stopped", "other"
IMPORTS, _END = "start: imports", "end"
# What makes the model better; all other seconds are the price of it.
TRAINING = ("forward", "backward", EXCHANGE, "optimizer")

_START = {
    "start": IMPORTS,
    "loading": "start: data and model",
    "joining": "start: process group",
    "setup": "start: strategy",
    "resuming": "start: checkpoint",
}
_STEP = {
    "data": "data",
    "waiting for tokens": "data",  # of sources that are tokenized while training
    "forward": "forward",
    "backward": "backward",
    "gradient norm": "optimizer",
    "optimizer": "optimizer",
    "metrics": "logging",
    "step policies and observers": "logging",
}
# Compilation runs inside the first passes, whose own seconds do not include it.
_OUTSIDE_STEPS = {
    name: name for name in ("evaluation", "generation", "checkpoint", "export", "replay", "profile", "compilation")
} | {
    FINISHED: _END,
    "finishing": "logging",
    "copies": "checkpoint",
    "rewinding": "checkpoint",
    "profile writing": "profile",
}
# In the order in which they are shown.
CATEGORIES = (
    *TRAINING,
    *("data", WAITING, "evaluation", "generation", "checkpoint", "export", "logging", "replay", "profile"),
    *(REPEATED, STOPPED, *_START.values(), "compilation", _END, OTHER),
)
# Events of the rank that trains, unlike those of the launcher and of policies.
_WORK = ("start", "rewind", "step", "evaluate", "generate", "checkpoint", "finish")
# Seconds between two lines: a part of the time of the launch, within bounds.
_PART, _LEAST, _MOST = 1 / 60, 1.0, 30.0
_TAIL_BYTES = 2**16
_LARGEST_SECONDS = 1e11
_RANK = re.compile(r"rank-(\d{1,9})\.jsonl")
_MOST_LOST = 1000  # returns to an earlier step that are told apart
SHOWN_RANKS = 8  # with curves or figures of their own, as many as a node has GPUs
_READING = 1000.0  # seconds between two looks at the newest lines, per second that a look takes
_LONGEST_END = 10.0  # seconds; after an older line, the rank could not write its last one


def sum_by_category(spent: Mapping[Use, float], behind: float, slowed: float = 0.0) -> dict[str, float]:
    """Return seconds by category.

    Args:
        spent: by phase, and whether inside a collective.
        behind: the part of the collectives of steps in which slower ranks kept this one waiting.
        slowed: the part of the passes and updates that checkpoints beside them have taken.
    """
    seconds_by_category: dict[str, float] = defaultdict(float)
    for (phase, waiting), seconds in spent.items():
        if phase in _STEP:
            seconds_by_category[EXCHANGE if waiting else _STEP[phase]] += seconds
        else:
            seconds_by_category[_START.get(phase) or _OUTSIDE_STEPS.get(phase, OTHER)] += seconds
    wait = min(behind, seconds_by_category[EXCHANGE])
    seconds_by_category[EXCHANGE] -= wait
    seconds_by_category[WAITING] += wait
    passes = sum(seconds_by_category[name] for name in TRAINING)
    share = min(1.0, max(0.0, slowed) / passes) if passes > 0.0 else 0.0
    for name in TRAINING:
        seconds_by_category["checkpoint"] += share * seconds_by_category[name]
        seconds_by_category[name] *= 1.0 - share
    return {name: seconds_by_category[name] for name in CATEGORIES if seconds_by_category[name] > 0.0}


def open_rank_ledger(rank: ObservedRank) -> LedgerWriter:
    """Return the writer of a rank's ledger."""
    parent = os.getppid() if rank.info.local_size > 1 else None
    sampler = UsageSampler(None if rank.gpu is None else rank.gpu.address, parent)
    return LedgerWriter(rank.directory, rank.info.rank, rank.heartbeat, sampler)


class LedgerWriter:
    """Append what ``own`` has counted to the ledger of a run, from a thread; a disk error ends nothing.

    Args:
        sample: returns what the machine has done since the last call, for the same line; the first and the last line
            have none, as of a few milliseconds it would say nothing.
    """

    def __init__(self, run: Path, rank: int, own: Heartbeat, sample: Callable[[], Mapping[str, Any]] = dict) -> None:
        self._file, self._rank, self._own, self._sample = locate_rank_file(run, rank), rank, own, sample
        self._started = time.time() - compute_process_age()
        # The heartbeat began after the interpreter and its imports.
        self._before = time.time() - (time.monotonic() - own.started) - self._started
        self._launch = 1 + max((line.launch for line in _parse_lines(_read_tail(self._file).splitlines())), default=0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_now_and_then, name="ledger", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the last line; a process that the launcher has forked writes one more when it ends."""
        self._closed.set()
        self._thread.join()
        self._write()  # here, where all marks are counted
        if parent_process() is not None:
            Finalize(None, self._write, exitpriority=0)

    def _write_now_and_then(self) -> None:
        self._write()  # also of a launch that is killed at once
        while not self._closed.wait(min(_MOST, max(_LEAST, (time.time() - self._started) * _PART))):
            self._write(self._sample())

    def _write(self, sample: Mapping[str, Any] | None = None) -> None:
        now, spent, use = time.time(), self._own.seconds(), self._own.use
        start = Use("start", waiting=False)
        spent[start] = spent.get(start, 0.0) + self._before
        # What has not ended yet, on a device what it has not done yet, belongs to what this rank does now.
        open_seconds = now - self._started - sum(spent.values())
        spent[use] = spent.get(use, 0.0) + max(0.0, open_seconds)
        categories = sum_by_category(spent, self._own.behind, self._own.slowed)
        seconds = {name: round(value, 4) for name, value in categories.items()}
        line = {
            "format": FORMAT,
            "launch": self._launch,
            "rank": self._rank,
            "time": round(now, 3),
            "step": self._own.newest_step,
            "started": round(self._started, 3),
            "seconds": seconds,
            "system": dict(sample or {}),
        }
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)  # not its parents: a deleted run directory stays deleted
            _append(self._file, line)


def _append(file: Path, line: Mapping[str, Any]) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # A line that a killed rank has begun stays the only damaged one.
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if cut else b"") + json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def count_ends(run: Path, ranks: Iterable[int]) -> None:
    """Count the time since the last line of each rank as its end. Call this when the processes have ended.

    A process takes some hundredths of a second to free its memory, after it has written its last line.
    """
    for rank in ranks:
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            line = json.loads(_read_tail(locate_rank_file(run, rank)).splitlines()[-1])
            now = time.time()
            if 0.0 < (seconds := now - line["time"]) < _LONGEST_END:
                updated_seconds = {**line["seconds"], _END: round(line["seconds"].get(_END, 0.0) + seconds, 4)}
                _append(locate_rank_file(run, rank), {**line, "time": round(now, 3), "seconds": updated_seconds})


def locate_rank_file(run: Path, rank: int) -> Path:
    """Return the file of a rank's ledger."""
    return run / DIRECTORY / f"rank-{rank}.jsonl"


class NewestSamples:
    """What the machines of the first ranks of a run did when each last wrote to its ledger.

    The files are read at most once a second, and so rarely that reading takes a thousandth of the time.
    """

    def __init__(self, run: Path, ranks: int) -> None:
        self._files = [locate_rank_file(run, rank) for rank in range(min(ranks, SHOWN_RANKS))]
        self._samples: list[Mapping[str, Any]] = []
        self._due = 0.0

    def __call__(self) -> Sequence[Mapping[str, Any]]:
        """Return a sample for each rank that has one."""
        start = time.monotonic()
        if start >= self._due:
            newest = (next(_parse_lines(reversed(_read_tail(file).splitlines())), None) for file in self._files)
            # Before the first step, a sample is of loading.
            self._samples = [line.system for line in newest if line is not None and line.step >= 0]
            now = time.monotonic()
            self._due = now + max(_LEAST, _READING * (now - start))
        return self._samples


@dataclass(frozen=True)
class LedgerLine:
    """A line of the ledger.

    Attributes:
        launch: counts the launches of this rank from 1.
        time: when it was written, in seconds since the epoch.
        step: the last step that had begun; -1 before the first.
        started: when the process of this launch was created.
        seconds: of this launch so far by category.
        system: what the machine did then.
    """

    launch: int
    time: float
    step: int
    started: float
    seconds: Mapping[str, float]
    system: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankLedger:
    """The seconds of a rank over all launches.

    Attributes:
        seconds: by category, with those of ``repeated`` and ``stopped``.
        wall: from the creation of its first process to its last line.
    """

    rank: int
    lines: Sequence[LedgerLine]
    seconds: Mapping[str, float]
    wall: float

    @property
    def trained(self) -> float:
        """The share of the wall time in which the rank did what makes the model better."""
        return sum(self.seconds.get(name, 0.0) for name in TRAINING) / self.wall if self.wall > 0 else 0.0


def read_ledger(run: Path, events: Sequence[EventRecord] = ()) -> list[RankLedger]:
    """Return the ledger of every rank of a run, in rank order; empty without one. Damaged lines are left out.

    Args:
        events: the run's events as they were written, which tell what was repeated after a fault.
    """
    lost = list(islice(_iterate_lost(events), _MOST_LOST))
    ledgers = []
    ranks = {int(match[1]): name for name in list_files_inside(run, DIRECTORY) if (match := _RANK.fullmatch(name))}
    for rank, name in sorted(ranks.items()):
        with suppress(OSError), open_inside(run, DIRECTORY, name) as file:
            if lines := list(_parse_lines(iterate_bounded_lines(file))):
                ledgers.append(_build_rank_ledger(rank, lines, lost))
    return ledgers


def _parse_lines(lines: Iterable[bytes]) -> Iterator[LedgerLine]:
    for text in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            line = json.loads(text)
            seconds = {str(name): _check_seconds(value) for name, value in line["seconds"].items()}
            times = _check_seconds(line["time"]), int(line["step"]), _check_seconds(line["started"])
            system = line.get("system")
            yield LedgerLine(int(line["launch"]), *times, seconds, system if isinstance(system, dict) else {})


def _check_seconds(seconds: float) -> float:
    if not abs(seconds) < _LARGEST_SECONDS:  # also of NaN
        raise ValueError("not a time")
    return float(seconds)


def _read_tail(file: Path) -> bytes:
    try:
        with open_inside(file.parent, file.name) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            return stream.read(_TAIL_BYTES)
    except OSError:
        return b""


class _Lost(NamedTuple):
    """The time in which a run did what it had to repeat, because it went back to an earlier step.

    Attributes:
        by_start: whether a new launch went back, so that nothing of that launch itself is lost.
    """

    started: float
    ended: float
    by_start: bool

    def clip_to_launch(self, launch: Sequence[LedgerLine]) -> tuple[float, float] | None:
        """Return the part of this time that belongs to a launch, if any does."""
        start, end = max(self.started, launch[0].started), min(self.ended, launch[-1].time)
        is_other = not self.by_start or launch[-1].time <= self.ended
        return (start, end) if is_other and start < end else None


def _iterate_lost(events: Iterable[EventRecord]) -> Iterator[_Lost]:
    """Yield what each launch and rewind lost: what came after the last event that still counts, also of a step that has
    not ended; nothing after a launch that ended by itself.
    """
    history: list[EventRecord] = []
    for event in events:
        if event["event"] in ("start", "rewind"):
            gone = [is_superseded(past, event) for past in history]
            first = gone.index(True) if True in gone else len(history)
            last_work = next((past for past in reversed(history[:first]) if past["event"] in _WORK), None)
            if last_work is not None and last_work["event"] != "finish":
                times = float(last_work.get("time", 0.0)), float(event.get("time", 0.0))
                yield _Lost(*times, by_start=event["event"] == "start")
            history = [past for past, is_gone in zip(history, gone, strict=True) if not is_gone]
        history.append(event)


def _merge_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time that do not overlap: what was repeated may be undone again, with what was before it."""
    merged_spans: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged_spans and start <= merged_spans[-1][1]:
            merged_spans[-1] = merged_spans[-1][0], max(end, merged_spans[-1][1])
        else:
            merged_spans.append((start, end))
    return merged_spans


def _build_rank_ledger(rank: int, lines: Sequence[LedgerLine], lost: Sequence[_Lost]) -> RankLedger:
    launches = [list(group) for _, group in groupby(lines, lambda line: line.launch)]
    seconds: dict[str, float] = defaultdict(float)
    for launch in launches:
        launch_seconds = dict(launch[-1].seconds)
        parts = (lost_span.clip_to_launch(launch) for lost_span in lost)
        for start, end in _merge_spans(part for part in parts if part is not None):
            for name, value in _compute_seconds_between(launch, start, end).items():
                if not name.startswith("start"):
                    launch_seconds[name] -= value
                    launch_seconds[REPEATED] = launch_seconds.get(REPEATED, 0.0) + value
        for name, value in launch_seconds.items():
            seconds[name] += value
    for before, after in pairwise(launches):
        seconds[STOPPED] += max(0.0, after[0].started - before[-1].time)
    nonzero_seconds = {name: seconds[name] for name in (*CATEGORIES, *seconds) if seconds[name] > 0.0}
    return RankLedger(rank, lines, nonzero_seconds, lines[-1].time - lines[0].started)


def _compute_seconds_between(launch: Sequence[LedgerLine], start: float, ended: float) -> dict[str, float]:
    """Return the seconds of a launch between two times of it, by category."""
    at, until = _compute_seconds_until(launch, start), _compute_seconds_until(launch, ended)
    return {name: until.get(name, 0.0) - at.get(name, 0.0) for name in until}


def _compute_seconds_until(launch: Sequence[LedgerLine], when: float) -> dict[str, float]:
    """Return the seconds of a launch up to a time, in proportion between two lines."""
    after = bisect_left(launch, when, key=lambda line: line.time)
    if after == len(launch):
        return dict(launch[-1].seconds)
    line = launch[after]
    before = launch[after - 1] if after else LedgerLine(line.launch, line.started, -1, line.started, {})
    part = (when - before.time) / max(line.time - before.time, 1e-9)
    return {
        name: before.seconds.get(name, 0.0) + part * (value - before.seconds.get(name, 0.0))
        for name, value in line.seconds.items()
    }


_TICK, _LATE = 0.02, 0.015  # seconds


def open_stall_counter(rank: ObservedRank) -> AbstractContextManager[object]:
    """Return a context that counts a rank's stalls; a rank that is alone waits for no other."""
    return nullcontext() if rank.info.size == 1 else Stalls(rank.heartbeat)


class Stalls:
    """Count the seconds inside collectives in which this process did not run, with a thread that then wakes up late.

    A process that cpulimit stops, or that gets no processor, may stall in a collective that it has already entered. All
    ranks then wait in the collective, so their seconds do not show which rank stalled.
    """

    def __init__(self, own: Heartbeat) -> None:
        self._own = own
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="stalls", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _count(self) -> None:
        before, last_wait = time.monotonic(), self._own.waited()
        while not self._closed.wait(_TICK):
            now, now_waited = time.monotonic(), self._own.waited()
            if (late := now - before - _TICK) > _LATE:
                self._own.stalled += min(late, max(0.0, now_waited - last_wait))
            before, last_wait = now, now_waited
