"""The file of a worker's heartbeat: its layout, and what a reader finds in it."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

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


def heartbeat_directory(run: Path) -> Path | None:
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


def heartbeat_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return directory / f"rank-{rank}"


def write_start(memory: mmap, started: float) -> None:
    """Write when the heartbeat began."""
    _BEGUN.pack_into(memory, _BEGUN_AT, started)


def write_phase(memory: mmap, index: int, name: str) -> None:
    """Write a phase that has not ended yet."""
    _PHASE.pack_into(memory, _PHASES_AT + index * _PHASE.size, 0, 0.0, name.encode()[:32])


def write_times(memory: mmap, index: int, times: Times) -> None:
    """Write how long a phase has taken."""
    _TIMES.pack_into(memory, _PHASES_AT + index * _PHASE.size, times.count, times.longest)


def write_call(memory: mmap, index: int, name: str, tensor: str, line: str) -> None:
    """Write a call of a collective."""
    _CALL.pack_into(
        memory, _CALLS_AT + index * _CALL.size, name.encode()[:24], tensor.encode()[:48], line.encode()[-160:]
    )


def read(file: Path) -> Beat | None:
    """Return what a rank does; None if it has not begun, or is writing all the time."""
    for _ in range(8):
        try:
            data = file.read_bytes()
            second_read = file.read_bytes()
        except OSError:
            return None
        if len(data) == SIZE and data == second_read and memoryview(data).cast("q")[MARKS]:
            return _beat(data)
    return None


def _beat(data: bytes) -> Beat:
    words = memoryview(data).cast("q")
    places = (_PHASE.unpack_from(data, _PHASES_AT + offset * _PHASE.size) for offset in range(PHASES))
    phases = [(_text(name), Times(count, longest)) for count, longest, name in places]
    collectives = {}
    for offset in range(COLLECTIVES_AT, COLLECTIVES_AT + 2 * COLLECTIVES, 2):
        number, call = words[offset], words[offset + 1]
        if number:
            collectives[number] = _collective(data, number, call // 2, bool(call % 2))
    call, entered = words[CALL], words[ENTERED]
    return Beat(
        pid=words[PID],
        started_at=_BEGUN.unpack_from(data, _BEGUN_AT)[0],
        marks=words[MARKS],
        entered=entered,
        waiting=bool(words[IS_WAITING]),
        step=words[STEP],
        micro_batch=words[MICRO_BATCH],
        phase=phases[words[PHASE]][0],
        collective=None if call < 0 else _collective(data, entered, call, same_shape=False),
        times={name: times for name, times in phases if times.count},
        collectives=collectives,
    )


def _collective(data: bytes, number: int, call: int, same_shape: bool) -> EnteredCollective:
    name, tensor, line = _CALL.unpack_from(data, _CALLS_AT + call * _CALL.size)
    return EnteredCollective(number, _text(name), _text(tensor), _text(line), same_shape)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
