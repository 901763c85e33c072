"""The heartbeat of a worker: what it does now, in a small file that a watcher outside the process reads.

A thread of the worker could not tell that its interpreter is blocked, so another process watches. The file is mapped
into memory, normally under /dev/shm; writing costs a few microseconds and never waits. A reader that meets a write
reads again. The worker also sums the seconds of its phases, which it writes to the ledger of its run.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from trainwright.spent import Spent, Use

FINISHED = "finished"
# The part of a phase that is spent waiting for other ranks has a history of its own.
WAITING = "waiting"

_HEAD = struct.Struct("<QQ?qq32s24s48s160sQ")
_PHASE = struct.Struct("<Qd32s")
_TIMES = struct.Struct("<Qd")
_PHASES = 24
_COLLECTIVE = struct.Struct("<Q?24s48s160s")
_COLLECTIVES = 32
_BEGUN = struct.Struct("<d")
_PHASES_AT = 512
_BEGUN_AT = _PHASES_AT - _BEGUN.size
_COLLECTIVES_AT = _PHASES_AT + 2048
_SIZE = 16384
_SHARED_MEMORY = Path("/dev/shm")
# The share of the longest time that is left after another, in the first times and later: the first may include
# compilation, and a single slow one should not count forever.
_FIRST_TIMES, _FIRST_DECAY, _DECAY = 4, 0.5, 0.99


@dataclass(frozen=True)
class Collective:
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
    """How often a phase has ended, and the most seconds between two marks in it, with older phases counting less."""

    count: int
    longest: float


@dataclass(frozen=True)
class Beat:
    """What a rank did when its file was read.

    Attributes:
        begun: when the heartbeat began, on the clock of ``time.monotonic``, which all processes of a machine share.
        marks: counts everything the rank has reported; it does not change while the rank is stuck.
        entered: the number of collectives of all ranks that it has entered.
        waiting: whether it is inside a collective.
        step, micro_batch: -1 outside a step.
        times: of phases by name.
        collectives: the last ones by number.
    """

    pid: int
    begun: float
    marks: int
    entered: int
    waiting: bool
    step: int
    micro_batch: int
    phase: str
    collective: Collective | None
    times: dict[str, Times]
    collectives: dict[int, Collective]


class _Times:
    """How long a phase has taken, and where the file has it; None: it has no space left.

    ``now``: the most seconds between two marks since the phase began.
    """

    __slots__ = "count", "longest", "now", "place"

    def __init__(self, place: int | None) -> None:
        self.count, self.longest, self.now, self.place = 0, 0.0, 0.0, place


class _Phase:
    """A phase that has been seen, with what every mark of it needs."""

    __slots__ = "encoded", "inside", "name", "outside", "times"

    def __init__(self, name: str, times: _Times) -> None:
        self.name, self.encoded, self.times = name, name.encode(), times
        self.outside, self.inside = Use(name, waiting=False), Use(name, waiting=True)


class Heartbeat:
    """Write what this process does to ``file``, which is made anew.

    Args:
        file: None: nobody watches; only seconds are summed.

    Raises:
        OSError: there is no space.
    """

    def __init__(self, file: Path | None) -> None:
        self._memory = mmap.mmap(-1, _SIZE) if file is None else self._mapped(file)
        self._pid = os.getpid()
        self._marks = self._entered = 0
        self._waiting = False
        self._step = self._micro_batch = -1
        self._collective = (b"", b"", b"")
        self._places = 0
        self._phases: dict[str, _Phase] = {}
        self._waits = self._new_times(WAITING)
        self._phase = self._outer = self._phase_named("start")
        self.spent = Spent()
        self._since = self.spent.begun
        _BEGUN.pack_into(self._memory, _BEGUN_AT, self.spent.begun)
        self.newest_step = -1
        self.behind = 0.0  # seconds for which slower ranks have kept this one waiting
        self.stalled = 0.0  # seconds inside collectives in which this process did not run, see `Stalls`
        self.changed: Callable[[Use, int, int], None] | None = None  # told each use with its step and micro-batch
        self._write()
        if file is not None:
            self._scratch(file).replace(file)  # readers see it complete

    @staticmethod
    def _scratch(file: Path) -> Path:
        return file.with_name(f".{file.name}.{os.getpid()}")

    def _mapped(self, file: Path) -> mmap.mmap:
        scratch = self._scratch(file)
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Without space, writing to the mapping would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, _SIZE)
            else:
                os.write(descriptor, bytes(_SIZE))
            return mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    def _new_times(self, name: str) -> _Times:
        if self._places == _PHASES:
            return _Times(None)
        place = _PHASES_AT + self._places * _PHASE.size
        self._places += 1
        _PHASE.pack_into(self._memory, place, 0, 0.0, name.encode()[:32])
        return _Times(place)

    def _phase_named(self, name: str) -> _Phase:
        known = self._phases.get(name)
        if known is None:
            known = self._phases[name] = _Phase(name, self._new_times(name))
        return known

    @property
    def use(self) -> Use:
        """What this process does now."""
        return self._phase.inside if self._waiting else self._phase.outside

    def phase(self, name: str, step: int = -1, micro_batch: int = -1) -> None:
        """Begin a phase; the one before ends."""
        self._took(True)
        self._phase = self._phase_named(name)
        self._step, self._micro_batch = step, micro_batch
        if step >= 0:
            self.newest_step = step
        self._write()

    def progress(self) -> None:
        """Report that the phase goes on, from work in it that may take long without a collective."""
        self._took()
        self._write()

    def begin_within(self, name: str) -> None:
        """Begin a phase within the present one, which goes on with `end_within`."""
        self._took()
        self._outer, self._phase = self._phase, self._phase_named(name)
        self._write()

    def end_within(self) -> None:
        """End the inner phase."""
        self.phase(self._outer.name, self._step, self._micro_batch)

    def enter(self, name: str, tensor: str, line: str, *, counted: bool, same_shape: bool) -> None:
        """Enter a collective; ``counted``: all ranks take part."""
        self._took()
        self._collective = (name.encode()[:24], tensor.encode()[:48], line.encode()[-160:])
        if counted:
            self._entered += 1
            place = _COLLECTIVES_AT + self._entered % _COLLECTIVES * _COLLECTIVE.size
            _COLLECTIVE.pack_into(self._memory, place, self._entered, same_shape, *self._collective)
        self._waiting = True
        self._write()

    def leave(self) -> None:
        """Leave the collective."""
        self._took()
        self._waiting = False
        self._write()

    def waited(self) -> float:
        """Return the seconds inside collectives so far, with those of the present one; for another thread."""
        since, waiting, ended = self._since, self._waiting, self.spent.in_collectives
        return ended + (time.monotonic() - since if waiting else 0.0)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Report that this rank waits for collectives that it has entered before."""
        self._took()
        self._waiting = True
        self._write()
        try:
            yield
        finally:
            self.leave()

    def _took(self, ended: bool = False) -> None:
        """Add the time since the last mark to the history of the phase, or of waiting; ``ended``: the phase ends.

        Until a phase has ended, it may have parts that are not like those before: what it does after its first
        collective may compile, or evaluate with another metric.
        """
        now = time.monotonic()
        seconds = now - self._since
        phase = self._phase
        use, times = (phase.inside, self._waits) if self._waiting else (phase.outside, phase.times)
        self.spent.end(use, seconds)
        self._since = now  # after the sum, so that `waited` in another thread never goes back
        if ended or self._waiting:
            if seconds < times.now:
                seconds = times.now
            least = times.longest * (_FIRST_DECAY if times.count < _FIRST_TIMES else _DECAY)
            times.longest = seconds if seconds > least else least
            times.count += 1
            times.now = 0.0
        elif seconds > times.now:
            times.now = seconds
            if seconds <= times.longest:
                return
            times.longest = seconds
        else:
            return
        if times.place is not None:
            _TIMES.pack_into(self._memory, times.place, times.count, times.longest)

    def _write(self) -> None:
        # Packing begins with zeros and ends with the number of marks: readers wait where it is 0.
        self._marks += 1
        _HEAD.pack_into(
            self._memory,
            0,
            self._pid,
            self._entered,
            self._waiting,
            self._step,
            self._micro_batch,
            self._phase.encoded,
            *self._collective,
            self._marks,
        )
        if self.changed is not None:
            self.changed(self.use, self._step, self._micro_batch)


_own: Heartbeat | None = None


def begin(directory: Path | None, rank: int) -> None:
    """Begin this worker's heartbeat, in a file in ``directory``; without space there, the worker is not watched."""
    global _own
    try:
        _own = Heartbeat(None if directory is None else heartbeat_file(directory, rank))
    except OSError:
        _own = Heartbeat(None)


def own() -> Heartbeat | None:
    """Return the heartbeat of this process; None if it is not a worker of a run."""
    return _own


def in_collectives() -> float:
    """Return the seconds that this process has spent in collectives so far."""
    return 0.0 if _own is None else _own.spent.in_collectives


def phase(name: str, step: int = -1, micro_batch: int = -1) -> None:
    """Report that a phase begins."""
    if _own is not None:
        _own.phase(name, step, micro_batch)


def progress() -> None:
    """Report that the phase goes on, from work in it that may take long without a collective."""
    if _own is not None:
        _own.progress()


def inside() -> AbstractContextManager[None]:
    """Report that this rank waits for collectives that it has entered before, while the context is entered."""
    return nullcontext() if _own is None else _own.inside()


def finish() -> None:
    """Report that this worker has no more work, so that it is not watched any longer."""
    phase(FINISHED)


def heartbeat_directory(run: Path) -> Path | None:
    """Return the directory of the run's heartbeats on this machine, created if missing; None if there is none."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(run))).hexdigest()[:16]
    for base in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        directory = base / f"trainwright-{os.getuid()}-{name}"
        with suppress(OSError):
            directory.mkdir(mode=0o700, exist_ok=True)
            found = directory.lstat()
            if found.st_uid == os.getuid() and directory.is_dir() and not directory.is_symlink():
                return directory
    return None


def heartbeat_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return directory / f"rank-{rank}"


def read(file: Path) -> Beat | None:
    """Return what a rank does; None if it has not begun, or is writing all the time."""
    for _ in range(8):
        try:
            data = file.read_bytes()
            again = file.read_bytes()
        except OSError:
            return None
        if len(data) == _SIZE and data == again and _HEAD.unpack_from(data)[-1]:
            return _beat(data)
    return None


def _beat(data: bytes) -> Beat:
    pid, entered, waiting, step, micro_batch, phase, name, tensor, line, marks = _HEAD.unpack_from(data)
    current = Collective(entered, _text(name), _text(tensor), _text(line), same_shape=False)
    times = {}
    for place in range(_PHASES):
        count, longest, of = _PHASE.unpack_from(data, _PHASES_AT + place * _PHASE.size)
        if count:
            times[_text(of)] = Times(count, longest)
    collectives = {}
    for place in range(_COLLECTIVES):
        number, same, name, tensor, line = _COLLECTIVE.unpack_from(data, _COLLECTIVES_AT + place * _COLLECTIVE.size)
        if number:
            collectives[number] = Collective(number, _text(name), _text(tensor), _text(line), same)
    (begun,) = _BEGUN.unpack_from(data, _BEGUN_AT)
    now = entered, waiting, step, micro_batch, _text(phase), current if current.name else None
    return Beat(pid, begun, marks, *now, times, collectives)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
