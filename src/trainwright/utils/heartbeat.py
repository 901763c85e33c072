"""The heartbeat of a worker: what it does now, in a small file that a watcher outside the process reads.

A thread of the worker could not tell that its interpreter is blocked, so another process watches. The file is mapped
into memory, normally under /dev/shm; writing costs a few microseconds and never waits. A reader that meets a write
reads again. The worker also sums the seconds of its phases, which it writes to the ledger of its run.

Each mark comes after other work, so that most of what it touches is in no cache of the processor: it only sets a few
words, and notes the time. What follows from the times is counted later, for many marks at once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

FINISHED = "finished"
# The part of a phase that is spent waiting for other ranks has a history of its own.
WAITING = "waiting"

# Another layout needs another size: a file that an earlier version has left is then none.
SIZE = 20480
# The file begins with words of 8 bytes, which a writer sets one by one: the number of marks is 0 meanwhile.
MARKS, PID, ENTERED, IS_WAITING, PHASE, STEP, MICRO_BATCH, CALL = range(8)
# The last collectives by number, two words each: the number; which call, times 2, plus 1 if its tensor has the same
# shape on every rank.
COLLECTIVES, COLLECTIVES_AT = 32, 256
# Calls of collectives. There are more than collectives, so that one is always free.
CALLS = 56
# The phases that have been seen.
PHASES = 36

_WORD = 8
_BEGUN_AT, _BEGUN = 8 * _WORD, struct.Struct("=d")
_PHASES_AT, _PHASE, _TIMES = 256, struct.Struct("=qd32s"), struct.Struct("=qd")
_CALLS_AT, _CALL = (COLLECTIVES_AT + 2 * COLLECTIVES) * _WORD, struct.Struct("=24s48s160s")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class EnteredCollective:
    """A collective that a rank has entered.

    Attributes:
        number: how many collectives of all ranks this rank has entered, with this one.
        name: the function of torch.distributed.
        tensor: type and shape; "" if they are not known.
        line: file and line of the call.
        same_shape: whether the tensor must have the same type and shape on every rank.
    """

    number: int
    name: str
    tensor: str
    line: str
    same_shape: bool


@dataclass(frozen=True)
class Times:
    """How long a phase has taken, by the marks that the rank has counted; it counts at least once a second.

    Attributes:
        count: how often it has ended; of more than four times, a number from then on.
        longest: the most seconds between two marks in it, in the last hours; the first four times, which may include
            compilation, count less. Up to 5 % more.
    """

    count: int
    longest: float


@dataclass(frozen=True)
class Beat:
    """What a rank did when its file was read.

    Attributes:
        started_at: when the heartbeat began, on the clock of ``time.monotonic``, one for all processes of a machine.
        marks: counts everything the rank has reported; it does not change while the rank is stuck.
        entered: the number of collectives of all ranks that it has entered.
        waiting: whether it is inside a collective.
        step, micro_batch: -1 outside a step.
        times: of phases by name.
        collectives: the last ones by number.
    """

    pid: int
    started_at: float
    marks: int
    entered: int
    waiting: bool
    step: int
    micro_batch: int
    phase: str
    collective: EnteredCollective | None
    times: dict[str, Times]
    collectives: dict[int, EnteredCollective]


def create_heartbeat_directory(run: Path) -> Path | None:
    """Return the directory of the run's heartbeats on this machine, created if missing; None if there is none."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:16]
    for base in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        directory = base / f"trainwright-{os.getuid()}-{name}"
        with suppress(OSError):
            directory.mkdir(mode=0o700, exist_ok=True)
            status = directory.lstat()
            if status.st_uid == os.getuid() and directory.is_dir() and not directory.is_symlink():
                return directory
    return None


def build_heartbeat_path(directory: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return directory / f"rank-{rank}"


def read(file: Path) -> Beat | None:
    """Return what a rank does; None if it has not begun, or is writing all the time."""
    for _ in range(8):
        try:
            data = file.read_bytes()
            second_read = file.read_bytes()
        except OSError:
            return None
        if len(data) == SIZE and data == second_read and memoryview(data).cast("q")[MARKS]:
            return _parse_beat(data)
    return None


def _parse_beat(data: bytes) -> Beat:
    words = memoryview(data).cast("q")
    phase_records = (_PHASE.unpack_from(data, _compute_phase_offset(index)) for index in range(PHASES))
    phases = [(_parse_text(name), Times(count, longest)) for count, longest, name in phase_records]
    collectives = {}
    for offset in range(COLLECTIVES_AT, COLLECTIVES_AT + 2 * COLLECTIVES, 2):
        number, call = words[offset], words[offset + 1]
        if number:
            collectives[number] = _parse_collective(data, number, call // 2, bool(call % 2))
    call, collective_number = words[CALL], words[ENTERED]
    return Beat(
        pid=words[PID],
        started_at=_BEGUN.unpack_from(data, _BEGUN_AT)[0],
        marks=words[MARKS],
        entered=collective_number,
        waiting=bool(words[IS_WAITING]),
        step=words[STEP],
        micro_batch=words[MICRO_BATCH],
        phase=phases[words[PHASE]][0],
        collective=None if call < 0 else _parse_collective(data, collective_number, call, same_shape=False),
        times={name: times for name, times in phases if times.count},
        collectives=collectives,
    )


def _parse_collective(data: bytes, number: int, call: int, same_shape: bool) -> EnteredCollective:
    name, tensor, line = _CALL.unpack_from(data, _CALLS_AT + call * _CALL.size)
    return EnteredCollective(number, _parse_text(name), _parse_text(tensor), _parse_text(line), same_shape)


def _compute_phase_offset(index: int) -> int:
    """Return where the file has a phase: how often it has ended, its longest time, and its name."""
    return _PHASES_AT + index * _PHASE.size


def _parse_text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


_OTHERS = "another phase"  # all that the file has no space for
# The share of the longest time that is left after another of the first times, which may include compilation.
_FIRST_TIMES, _FIRST_DECAY = 4, 0.5
# The longest time of this period and of the one before is kept. A period has at least these times and seconds: slow
# times may be rare, in a phase that is short or seldom too, but a time of hours must not count as usual for days.
_PERIOD_TIMES, _PERIOD_SECONDS = 1000, 2 * 3600.0
# A longest time that falls is written when it is less than what was written by this part.
_FALLEN = 0.05
# Marks are counted at least this often, in seconds; those of the first times at once, as there are no others.
_COUNT_SECONDS = 1.0


class _Phase:
    """A phase that has been seen: where the file has it, what its seconds count as, and how long it has taken.

    ``now``: the most seconds between two marks since the phase began; ``recent``, ``earlier``: in this period and in
    the one before; ``longest``: of these; ``written``: the longest that the file has.
    """

    __slots__ = (
        *("count", "earlier", "inside", "longest", "name", "now", "outside", "period_started", "period_count"),
        *("index", "recent", "seconds_inside", "seconds_outside", "written"),
    )

    def __init__(self, name: str, index: int, started: float) -> None:
        self.name, self.index = name, index
        self.outside, self.inside = Use(name, waiting=False), Use(name, waiting=True)
        self.count = self.period_count = 0
        self.period_started = started
        self.longest = self.recent = self.earlier = self.now = self.written = 0.0
        self.seconds_outside = self.seconds_inside = 0.0  # on the clock of the host, see `Spent`

    def record_seconds(self, seconds: float, at: float, phase_ended: bool) -> bool:
        """Add the time between two marks, the second ``at``, to the history; return whether it has to be written.

        Until a phase has ended, it may have parts that are not like those before: what it does after its first
        collective may compile, or evaluate with another metric.
        """
        if seconds > self.now:
            self.now = seconds
        if phase_ended:
            if self.count < _FIRST_TIMES:
                self.recent *= _FIRST_DECAY
            if self.now > self.recent:
                self.recent = self.now
            self.now = 0.0
            self.count += 1
            if self.count - self.period_count >= _PERIOD_TIMES and at - self.period_started >= _PERIOD_SECONDS:
                self.earlier, self.recent = self.recent, 0.0
                self.period_started, self.period_count = at, self.count
        self.longest = longest = max(self.now, self.recent, self.earlier)
        is_new = phase_ended and self.count <= _FIRST_TIMES
        return is_new or not longest <= self.written <= longest * (1 + _FALLEN)


class Heartbeat:
    """Write what this process does to ``file``, which is made anew.

    Args:
        file: None: nobody watches; only seconds are summed.

    Raises:
        OSError: there is no space.
    """

    def __init__(self, file: Path | None) -> None:
        self._memory = mmap.mmap(-1, SIZE) if file is None else self._map_file(file)
        self._words = memoryview(self._memory).cast("q")
        self._marks = self._entered = 0
        self._waiting = False
        self._calls: dict[tuple[str, str, str], int] = {}
        self._phases: dict[str, _Phase] = {}
        self._waits, _ = self._look_up_phase(WAITING), self._look_up_phase(FINISHED)  # they always have a place
        self._phase = self._outer = self._look_up_phase("start")
        self._spent = Spent()
        self.started = self._since = self._counted = time.monotonic()
        # By mark: the phase, whether this rank waited in it, whether it has ended, when, and how far a device was.
        self._uncounted: deque[tuple[_Phase, bool, bool, float, DeviceEvent | None]] = deque()
        self._waited = 0.0  # on the clock of the host
        self._thread = threading.get_ident()  # of training, which makes the marks and counts them
        self._record: Callable[[], DeviceEvent] | None = None
        self._inside = _Inside(self)
        _BEGUN.pack_into(self._memory, _BEGUN_AT, self.started)
        self.newest_step = -1
        self.behind = 0.0  # seconds for which slower ranks have kept this one waiting
        self.slowed = 0.0  # seconds of passes and updates that checkpoints beside them have taken
        self.stalled = 0.0  # seconds inside collectives in which this process did not run, see `Stalls`
        self.changed: Callable[[Use, int, int], None] | None = None  # told each use with its step and micro-batch
        self._words[PID], self._words[CALL] = os.getpid(), -1
        self._show(-1, -1)
        if file is not None:
            self._scratch(file).replace(file)  # readers see it complete

    @staticmethod
    def _scratch(file: Path) -> Path:
        return file.with_name(f".{file.name}.{os.getpid()}")

    def _map_file(self, file: Path) -> mmap.mmap:
        scratch = self._scratch(file)
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Without space, writing to the mapping would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, SIZE)
            else:
                os.write(descriptor, bytes(SIZE))
            return mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)

    def _look_up_phase(self, name: str) -> _Phase:
        if name not in self._phases:
            if len(self._phases) >= PHASES - 1:
                name = _OTHERS
            phase = self._phases.setdefault(name, _Phase(name, len(self._phases), time.monotonic()))
            _PHASE.pack_into(self._memory, _compute_phase_offset(phase.index), 0, 0.0, name.encode()[:32])
        return self._phases[name]

    @property
    def use(self) -> Use:
        """What this process does now."""
        return self._phase.inside if self._waiting else self._phase.outside

    def phase(self, name: str, step: int = -1, micro_batch: int = -1) -> None:
        """Begin a phase; the one before ends."""
        self._end(True)
        self._phase = self._phases.get(name) or self._look_up_phase(name)
        if step >= 0:
            self.newest_step = step
        self._show(step, micro_batch)

    def progress(self) -> None:
        """Report that the phase goes on, from work in it that may take long without a collective."""
        self._end()
        self._mark()

    def begin_within(self, name: str) -> None:
        """Begin a phase within the present one, which goes on with `end_within`."""
        self._end()
        self._outer, self._phase = self._phase, self._look_up_phase(name)
        self._show(self._words[STEP], self._words[MICRO_BATCH])

    def end_within(self) -> None:
        """End the inner phase."""
        self.phase(self._outer.name, self._words[STEP], self._words[MICRO_BATCH])

    def enter(self, name: str, tensor: str, line: str, *, counted: bool, same_shape: bool) -> None:
        """Enter a collective; ``counted``: all ranks take part."""
        self._end()
        words = self._words
        words[MARKS] = 0
        call = self._calls.get((name, tensor, line))
        if call is None:
            call = self._write_call(name, tensor, line)
        if counted:
            self._entered = number = self._entered + 1
            offset = COLLECTIVES_AT + 2 * (number % COLLECTIVES)
            words[offset], words[offset + 1], words[ENTERED] = number, 2 * call + same_shape, number
        words[CALL] = call
        self._wait()

    def _write_call(self, name: str, tensor: str, line: str) -> int:
        """Write a call, if need be in place of one that none of the last collectives refers to."""
        if len(self._calls) < CALLS:
            index = len(self._calls)
        else:
            calls = self._words[COLLECTIVES_AT + 1 : COLLECTIVES_AT + 2 * COLLECTIVES : 2].tolist()
            used_calls = {call // 2 for call in calls}
            index = self._calls.pop(next(key for key, index in self._calls.items() if index not in used_calls))
        self._calls[name, tensor, line] = index
        texts = name.encode()[:24], tensor.encode()[:48], line.encode()[-160:]
        _CALL.pack_into(self._memory, _CALLS_AT + index * _CALL.size, *texts)
        return index

    def leave(self) -> None:
        """Leave the collective."""
        self._end()
        self._waiting = False
        self._words[IS_WAITING] = 0
        self._mark()

    def inside(self) -> AbstractContextManager[None]:
        """Report that this rank waits for collectives that it has entered before, while the context is entered."""
        return self._inside

    def _wait(self) -> None:
        self._waiting = True
        self._words[IS_WAITING] = 1
        self._mark()

    def _end(self, phase_ended: bool = False) -> None:
        """Note that what this process did since the last mark has ended."""
        now, waiting = time.monotonic(), self._waiting
        phase, event, seconds = self._phase, None, now - self._since
        if self._record is not None:
            event = self._record()
        elif waiting:
            phase.seconds_inside += seconds
            self._waited += seconds
        else:
            phase.seconds_outside += seconds
        self._uncounted.append((phase, waiting, phase_ended, now, event))
        self._since = now  # after the sum, so that `waited` in another thread never goes back
        if phase.count < _FIRST_TIMES or now - self._counted > _COUNT_SECONDS:
            self._count()

    def _show(self, step: int, micro_batch: int) -> None:
        words = self._words
        words[MARKS] = 0
        words[PHASE], words[STEP], words[MICRO_BATCH] = self._phase.index, step, micro_batch
        self._mark()

    def _mark(self) -> None:
        self._marks = self._words[MARKS] = self._marks + 1
        if self.changed is not None:
            self.changed(self.use, self._words[STEP], self._words[MICRO_BATCH])

    def _count(self) -> None:
        """Add the times of all marks to the histories, and what a device has done to its seconds."""
        while self._uncounted:
            phase, waited, phase_ended, now, event = self._uncounted.popleft()
            seconds, self._counted = now - self._counted, now
            if event is not None:
                self._spent.end(phase.inside if waited else phase.outside, event)
            of = self._waits if waited else phase
            if of.record_seconds(seconds, now, phase_ended or waited):
                of.written = of.longest
                _TIMES.pack_into(self._memory, _compute_phase_offset(of.index), of.count, of.longest)

    def follow_device(self, record: Callable[[], DeviceEvent]) -> None:
        """Use the clock of a device from now on. ``record``: returns the end of the work that it has been given."""
        self._count()
        self._spent.follow_device(record())
        self._record = record

    def seconds(self) -> dict[Use, float]:
        """Return the seconds of this process by use; what a device has not done yet is left out.

        Other threads than that of training get what it has counted: they must not use its device.
        """
        if threading.get_ident() == self._thread:
            self._count()
        seconds_by_use = self._spent.read()
        for phase in list(self._phases.values()):
            for use, seconds in ((phase.outside, phase.seconds_outside), (phase.inside, phase.seconds_inside)):
                if seconds:
                    seconds_by_use[use] = seconds_by_use.get(use, 0.0) + seconds
        return seconds_by_use

    def seconds_outside(self, names: Iterable[str]) -> float:
        """Return the seconds of these phases outside collectives, from the thread of training."""
        if self._record is not None:
            seconds_by_use = self.seconds()
            return sum(seconds_by_use.get(Use(name, waiting=False), 0.0) for name in names)
        phases = (self._phases.get(name) for name in names)
        return sum(phase.seconds_outside for phase in phases if phase is not None)

    @property
    def in_collectives(self) -> float:
        """Seconds inside collectives that have ended."""
        return self._waited + self._spent.in_collectives

    def waited(self) -> float:
        """Return the seconds inside collectives so far, with those of the present one; for another thread."""
        since, waiting, ended_seconds = self._since, self._waiting, self.in_collectives
        return ended_seconds + (time.monotonic() - since if waiting else 0.0)


class _Inside(AbstractContextManager[None]):
    """Wait for collectives while it is entered."""

    def __init__(self, own: Heartbeat) -> None:
        self._own = own

    def __enter__(self) -> None:
        self._own._end()
        self._own._wait()

    def __exit__(self, *_: object) -> None:
        self._own.leave()


_own: Heartbeat | None = None


def begin(directory: Path | None, rank: int) -> None:
    """Begin this worker's heartbeat, in a file in ``directory``; without space there, the worker is not watched."""
    global _own
    try:
        _own = Heartbeat(None if directory is None else build_heartbeat_path(directory, rank))
    except OSError:
        _own = Heartbeat(None)


def find_own_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of this process; None if it is not a worker of a run."""
    return _own


def sum_collective_seconds() -> float:
    """Return the seconds that this process has spent in collectives so far."""
    return 0.0 if _own is None else _own.in_collectives


def begin_phase(name: str, step: int = -1, micro_batch: int = -1) -> None:
    """Report that a phase begins."""
    if _own is not None:
        _own.phase(name, step, micro_batch)


def note_progress() -> None:
    """Report that the phase goes on, from work in it that may take long without a collective."""
    if _own is not None:
        _own.progress()


def report_waiting() -> AbstractContextManager[None]:
    """Report that this rank waits for collectives that it has entered before, while the context is entered."""
    return nullcontext() if _own is None else _own.inside()


def finish() -> None:
    """Report that this worker has no more work, so that it is not watched any longer."""
    begin_phase(FINISHED)


class Use(NamedTuple):
    """What seconds were used for: a phase, and whether this rank was inside a collective then."""

    phase: str
    waiting: bool


class DeviceEvent(Protocol):
    """A point in the work of a device, such as ``torch.Event``."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this point to a later one."""


class Spent:
    """The seconds of the device that a process drives, by use.

    A host runs ahead of its GPU, so that its own clock would count most of a step where it waits for the results.
    """

    def __init__(self) -> None:
        self.in_collectives = 0.0
        self._seconds: dict[Use, float] = {}
        self._marks: deque[tuple[Use, DeviceEvent]] = deque()

    def follow_device(self, event: DeviceEvent) -> None:
        """Count from ``event`` on, which marks what the device has been given by now."""
        self._marks.append((Use("", waiting=False), event))

    def end(self, use: Use, event: DeviceEvent) -> None:
        """Add to ``use`` what the device does up to ``event``, once it has done it."""
        self._marks.append((use, event))
        while len(self._marks) > 1 and self._marks[1][1].query():
            (_, before), (of, after) = self._marks.popleft(), self._marks[0]
            seconds = before.elapsed_time(after) / 1000
            self._seconds[of] = self._seconds.get(of, 0.0) + seconds
            if of.waiting:
                self.in_collectives += seconds

    def read(self) -> dict[Use, float]:
        """Return the seconds that are known by now; what a device has not done yet is left out."""
        return self._seconds.copy()
