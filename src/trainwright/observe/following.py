"""Follow a run that another process trains: each look reads only what was added to its events since the last one.

Curves are kept in a bounded number of buckets, so that hundreds of runs of any length fit in memory. What was read is
cached, so that a finished run is not read again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.engine.event_reader import (
    EventRecord,
    find_curve_part,
    find_resumed_step,
    has_lost_steps,
    select_history,
)
from trainwright.engine.events import LONGEST_LINE, parse_event
from trainwright.machine.cache import find_cache_root, try_write
from trainwright.utils.paths import open_inside

EVENTS = "events.jsonl"
_CHUNK_BYTES = 2**20
_BUCKETS = 1024
_GLANCE_BYTES = 2**16  # of the beginning and the end of a long file
_FORMAT = 6  # of a state
# What a state has of a follower as it is.
_FIELDS = (
    *("start", "finish", "last_step", "newest", "everything", "began", "changed", "damaged", "is_cut_off"),
    *("_offset", "_file", "_seconds"),
)
_MOST_BREAKS = 1000  # of a curve
_MOST_METRICS, _LONGEST_NAME = 100, 200  # of the steps of a run; other metrics have no curve
_CURVES = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_time", "memory_bytes")


class Curves:
    """The steps of a run in at most ``2 * _BUCKETS`` buckets: the mean, lowest and highest value of each curve.

    Attributes:
        positions: by name the column of each bucket's last step: ``step``, ``tokens``, ``seconds`` (of training).
        values: by curve the columns of mean, lowest and highest value.
        breaks: the steps before which steps are missing.
    """

    def __init__(self, names: Sequence[str] = _CURVES) -> None:
        self._names = names
        self.positions = {name: array("d") for name in ("step", "tokens", "seconds")}
        self.values: dict[str, tuple[array[float], array[float], array[float]]] = {}
        self.breaks: list[int] = []
        self._counts = array("q")
        self._width = 1  # steps in a bucket

    def add(self, event: EventRecord, seconds: float, *, after_loss: bool = False) -> None:
        """Add a ``step`` event; ``seconds``: of training up to it; ``after_loss``: steps before it are missing."""
        if after_loss and len(self.breaks) < _MOST_BREAKS:
            self.breaks.append(int(event["step"]))
        row = (float(event["step"]), _convert_number(event.get("tokens")), seconds)
        opens = not self._counts or self._counts[-1] >= self._width
        if opens and len(self._counts) >= 2 * _BUCKETS:
            self._halve()
            opens = self._counts[-1] >= self._width
        if opens:
            self._counts.append(0)
        for position, column in zip(row, self.positions.values(), strict=True):
            if opens:
                column.append(position)
            else:
                column[-1] = position
        count = self._counts[-1] = self._counts[-1] + 1
        for name in self._names:
            value = event.get(name)
            if type(value) is not float:  # called for every step of every run: without a function where it need not be
                value = _convert_number(value)
            if name not in self.values:
                self._begin(name)
            mean, low, high = self.values[name]
            if count == 1:
                mean.append(value)
                low.append(value)
                high.append(value)
                continue
            mean[-1] += (value - mean[-1]) / count
            if value < low[-1]:
                low[-1] = value
            if value > high[-1]:
                high[-1] = value

    def cut(self, step: int) -> float:
        """Drop what comes after ``step``; return the seconds of training up to there."""
        at = self.positions["step"]
        while at and at[-1] > step:
            self._counts.pop()
            for column in self.positions.values():
                column.pop()
        for columns in self.values.values():
            for column in columns:
                del column[len(at) :]
        del self.breaks[find_curve_part(self.breaks, step) :]
        return self.positions["seconds"][-1] if at else 0.0

    def points(self, name: str, by: str, limit: int) -> list[list[float | None]]:
        """Return at most ``limit`` points of a curve as columns: place, mean, lowest, highest. None: not a number; a
        point of nothing else is a gap, where steps are missing.
        """
        mean, low, high = self.values.get(name, (array("d"),) * 3)
        size = len(mean)
        step = max(1, math.ceil(size / limit))
        at = self.positions[by]
        groups = [range(first, min(first + step, size)) for first in range(0, size, step)]
        counts = self._counts
        columns = [
            [_drop_infinite(at[group[-1]]) for group in groups],
            [
                _drop_infinite(sum(mean[i] * counts[i] for i in group) / sum(counts[i] for i in group))
                for group in groups
            ],
            [_drop_infinite(min(low[i] for i in group)) for group in groups],
            [_drop_infinite(max(high[i] for i in group)) for group in groups],
        ]
        parts = [find_curve_part(self.breaks, int(self.positions["step"][group[-1]])) for group in groups]
        for index in reversed(range(1, len(groups))):
            if parts[index] != parts[index - 1]:
                for column in columns:
                    column.insert(index, None)
        return columns

    def state(self) -> dict[str, Any]:
        """Return everything, for ``from_state``."""
        return {
            "names": self._names,
            "positions": {name: column.tolist() for name, column in self.positions.items()},
            "values": {name: [column.tolist() for column in columns] for name, columns in self.values.items()},
            "counts": self._counts.tolist(),
            "width": self._width,
            "breaks": self.breaks,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Curves:
        """Return the curves of a ``state``."""
        curves = cls(state["names"])
        curves.positions = {name: array("d", column) for name, column in state["positions"].items()}
        for name, (mean, low, high) in state["values"].items():
            curves.values[name] = array("d", mean), array("d", low), array("d", high)
        curves._counts, curves._width, curves.breaks = array("q", state["counts"]), state["width"], state["breaks"]
        return curves

    def _begin(self, name: str) -> None:
        before = len(self._counts) - (self._counts[-1] == 1)  # buckets without this curve
        columns = array("d", [math.nan] * before)
        self.values[name] = (columns, columns[:], columns[:])

    def _halve(self) -> None:
        """Join each two neighbouring buckets."""
        counts, pairs = self._counts, range(0, len(self._counts) - 1, 2)
        for columns in self.values.values():
            mean, low, high = columns
            merged_columns = (
                [(mean[i] * counts[i] + mean[i + 1] * counts[i + 1]) / (counts[i] + counts[i + 1]) for i in pairs],
                [min(low[i], low[i + 1]) for i in pairs],
                [max(high[i], high[i + 1]) for i in pairs],
            )
            for column, values in zip(columns, merged_columns, strict=True):
                column[:] = array("d", values)
        for column in self.positions.values():
            column[:] = array("d", [column[i + 1] for i in pairs])
        self._counts = array("q", [counts[i] + counts[i + 1] for i in pairs])
        self._width *= 2


class RunFollower:
    """What a run's ``events.jsonl`` says, up to the last look.

    Attributes:
        start: the newest ``start`` event; None before the first.
        finish: the ``finish`` event of the newest launch; None while it trains, and where it was killed.
        last_step: the newest ``step`` event that counts.
        everything: all others, also those that a resumed run repeated, such as the fault before a restart.
        newest: the newest event of any kind.
        curves: the steps.
        metrics: curves of the metrics of steps by name, each over the steps that have it.
        began, changed: the times of the first and of the newest event.
        damaged: lines that are not an event.
        is_cut_off: whether a line is so long that what follows is not read.
        version: changes with everything that was read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._forget()
        self.version = 0

    def _forget(self) -> None:
        self.start: EventRecord | None = None
        self.finish: EventRecord | None = None
        self.last_step: EventRecord | None = None
        self.everything: list[EventRecord] = []
        self.newest: EventRecord | None = None
        self.curves = Curves()
        self.metrics: dict[str, Curves] = {}
        self.began: float | None = None
        self.changed: float | None = None
        self.damaged = 0
        self.is_cut_off = False
        self._history: list[EventRecord] | None = []
        self._offset = 0
        self._file: int | None = None
        self._rest = b""
        self._seconds = 0.0  # of the steps that count

    def look(self) -> bool:
        """Read what is new; return whether there was something. Raises OSError if the file cannot be read."""
        return sum(self.read_in_parts()) > 0

    def read_in_parts(self) -> Iterator[int]:
        """Read what is new; yield the bytes of each part, so that the caller can do something else in between."""
        with open_inside(self.directory, EVENTS) as file:
            status = os.fstat(file.fileno())
            if self._file not in (None, status.st_ino) or status.st_size < self._offset:
                self._forget()  # another run has taken the place of this one
            self._file = status.st_ino
            file.seek(self._offset)
            while not self.is_cut_off and (part := file.read(_CHUNK_BYTES)):
                self._offset += len(part)
                complete, end, rest = part.rpartition(b"\n")
                if end:
                    self._take_lines(self._rest + complete)
                    self._rest = b""
                self._rest += rest  # half a line, until the rest of it is written
                if len(self._rest) > LONGEST_LINE:
                    self.is_cut_off, self._rest = True, b""
                self.version += 1
                yield len(part)

    @classmethod
    def from_glance(cls, directory: Path) -> RunFollower:
        """Return what the first and the last events of a run say: enough for its status while the rest is read.

        It has no goodput, and of a long run not all evaluations. Raises OSError if the file cannot be read.
        """
        follower = cls(directory)
        with open_inside(directory, EVENTS) as file:
            size = os.fstat(file.fileno()).st_size
            parts = [file.read(2 * _GLANCE_BYTES)] if size <= 2 * _GLANCE_BYTES else [file.read(_GLANCE_BYTES)]
            if size > 2 * _GLANCE_BYTES:
                parts[0] = parts[0].rpartition(b"\n")[0]
                file.seek(size - _GLANCE_BYTES)
                parts.append(file.read().partition(b"\n")[2])
        follower._take_lines(b"\n".join(parts))
        follower._seconds = math.nan
        return follower

    def count_unread_bytes(self) -> int:
        """Return how many bytes of the file are still to be read. Raises OSError if it cannot be read."""
        with open_inside(self.directory, EVENTS) as file:
            status = os.fstat(file.fileno())
        if self._file not in (None, status.st_ino) or status.st_size < self._offset:
            return status.st_size
        return 0 if self.is_cut_off else status.st_size - self._offset

    @property
    def events(self) -> list[EventRecord]:
        """The events that count, without steps."""
        if self._history is None:
            self._history = select_history(self.everything)
        return self._history

    @property
    def half_written(self) -> bool:
        """Whether what was read ends within a line."""
        return bool(self._rest.strip())

    @property
    def read_bytes(self) -> int:
        """How much of the file has been read."""
        return self._offset

    def state(self) -> bytes:
        """Return everything that was read, for ``from_state``."""
        state = {
            "format": _FORMAT,
            "fields": {name: getattr(self, name) for name in _FIELDS},
            "rest": self._rest.decode("latin-1"),
            "curves": self.curves.state(),
            "metrics": {name: curves.state() for name, curves in self.metrics.items()},
        }
        return json.dumps(state).encode()

    @classmethod
    def from_state(cls, directory: Path, state: bytes) -> RunFollower:
        """Return a follower that goes on from a ``state``.

        Raises:
            ValueError, KeyError, TypeError: it is not one, or of another version.
        """
        follower, read = cls(directory), json.loads(state)
        if read["format"] != _FORMAT:
            raise ValueError("the state is of another version")
        for name in _FIELDS:
            setattr(follower, name, read["fields"][name])
        follower._rest, follower._history = read["rest"].encode("latin-1"), None
        follower.curves = Curves.from_state(read["curves"])
        follower.metrics = {name: Curves.from_state(of_one) for name, of_one in read["metrics"].items()}
        return follower

    @property
    def step(self) -> int | None:
        """The last step that counts; None before the first."""
        return None if self.last_step is None else int(self.last_step["step"])

    @property
    def goodput(self) -> float | None:
        """The seconds of the steps that count, of all seconds since the run began."""
        if self.last_step is None or self.began is None or self.changed is None:
            return None
        share = self._seconds / max(1e-9, self.changed - self.began)
        return min(1.0, share) if math.isfinite(share) else None

    @property
    def tokens_per_second(self) -> float | None:
        """The median of the newest launch after its first two steps; of a long run, of the means of its buckets."""
        if "tokens_per_second" not in self.curves.values:
            return None
        first = find_resumed_step(self.start) if self.start else None
        first_index = bisect_right(self.curves.positions["step"], -1 if first is None else first)
        rates = [rate for rate in self.curves.values["tokens_per_second"][0][first_index:] if math.isfinite(rate)]
        return statistics.median(rates[2:] or rates) if rates else None

    def _take_lines(self, lines: bytes) -> None:
        for line in lines.decode("utf-8", "replace").split("\n"):
            if not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                self.damaged += 1
                continue
            if event["event"] == "step":
                self._take_step(event)
            else:
                self._take_other(event, event["event"])
            self.began = event["time"] if self.began is None else self.began
            self.changed, self.newest = event["time"], event

    def _take_step(self, event: EventRecord) -> None:
        seconds = float(event["step_time"])
        self._seconds += seconds
        after_loss = self.last_step is not None and has_lost_steps(self.last_step, event)
        self.curves.add(event, self._seconds, after_loss=after_loss)
        before = (self.last_step or {}).get("metrics") or {} if after_loss else {}
        for name, value in (event.get("metrics") or {}).items():
            if name not in self.metrics:
                if len(self.metrics) >= _MOST_METRICS or len(name) > _LONGEST_NAME:
                    continue
                self.metrics[name] = Curves((name,))
            row = {"step": event["step"], "tokens": event.get("tokens"), name: value}
            self.metrics[name].add(row, self._seconds, after_loss=name in before)
        self.last_step = event

    def _take_other(self, event: EventRecord, kind: str) -> None:
        if kind in ("start", "rewind"):
            resume_step = find_resumed_step(event)
            last_valid = -1 if resume_step is None else resume_step
            if self.step is not None and self.step > last_valid:
                self._seconds = self.curves.cut(last_valid)
                for curves in self.metrics.values():
                    curves.cut(last_valid)
                at = self.curves.positions["step"]
                self.last_step = {**self.last_step, "step": last_valid} if self.last_step and at else None
        if kind == "start":
            self.start, self.finish = event, None
        elif kind == "finish":
            self.finish = event
        self.everything.append(event)
        self._history = None


def _convert_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _drop_infinite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_CACHED_FROM_BYTES = 2**22  # less is read again in no time
_COMPARED_BYTES = 2**12
_CACHE_SECONDS = 90 * 86400.0


def open_follower(directory: Path) -> RunFollower:
    """Return a follower of a run, which has what was read of it before if the file has only grown since then."""
    cache_file = _locate_state(directory)
    try:
        identity, _, state = cache_file.read_bytes().partition(b"\n")
        follower = RunFollower.from_state(directory, state)
        if identity != _identify_file(directory, follower.read_bytes, identity.split(b" ")[0]):
            return RunFollower(directory)
        os.utime(cache_file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunFollower(directory)
    return follower


def save_follower(follower: RunFollower, before: int) -> int:
    """Keep what was read, if it is much more than the ``before`` bytes that are kept; return how many are."""
    if follower.read_bytes - before < _CACHED_FROM_BYTES:
        return before
    with suppress(OSError):  # of a run that was deleted meanwhile
        identity = _identify_file(follower.directory, follower.read_bytes)
        _remove_old()
        try_write(_locate_state(follower.directory), identity + b"\n" + follower.state())
    return follower.read_bytes


def read_run(directory: Path) -> RunFollower:
    """Return all that a run's events say. Raises OSError if they cannot be read."""
    follower = open_follower(directory)
    before = follower.read_bytes
    follower.look()
    save_follower(follower, before)
    return follower


def _identify_file(directory: Path, size: int, moment: bytes | None = None) -> bytes:
    """Return what tells whether the first ``size`` bytes of a file are the same.

    Args:
        moment: the time of its last change before, which does not count if it has grown since then.
    """
    with open_inside(directory, EVENTS) as file:
        status = os.fstat(file.fileno())
        first = file.read(min(size, _COMPARED_BYTES))
        file.seek(max(0, size - _COMPARED_BYTES))
        last = file.read(min(size, _COMPARED_BYTES))
    grown = moment is not None and status.st_size > size
    timestamp = moment if grown and moment is not None else str(status.st_mtime_ns).encode()
    digest = hashlib.sha256(first + last).hexdigest() if status.st_size >= size else "shorter"
    return b" ".join((timestamp, str(status.st_ino).encode(), digest.encode()))


def _locate_state(directory: Path) -> Path:
    return _locate_folder() / hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]


def _locate_folder() -> Path:
    return find_cache_root() / "events"


def _remove_old() -> None:
    with suppress(OSError):
        for file in _locate_folder().iterdir():
            if time.time() - file.stat().st_mtime > _CACHE_SECONDS:
                file.unlink(missing_ok=True)
