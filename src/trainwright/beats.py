"""The file of a worker's heartbeat: its layout, and what a reader finds in it."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FINISHED = "finished"
# The part of a phase that is spent waiting for other ranks has a history of its own.
WAITING = "waiting"

SIZE = 16384
# The file begins with words of 8 bytes, which a writer sets one by one: the number of marks is 0 meanwhile.
MARKS, PID, ENTERED, IS_WAITING, PHASE, STEP, MICRO_BATCH, CALL = range(8)
WORD = struct.Struct("=q")
BEGUN_AT, BEGUN = 8 * WORD.size, struct.Struct("=d")
# The phases that have been seen: how often each has ended, the most seconds between two marks in it, its name.
PHASES, PHASES_AT = 36, 256
TIMES, NAMED_TIMES = struct.Struct("=qd"), struct.Struct("=qd32s")
# The last collectives by number: the number; which call, times 2, with 1 if its tensor has the same shape everywhere.
COLLECTIVES, COLLECTIVES_AT = 32, 2048
COLLECTIVE = struct.Struct("=qq")
# Calls of collectives: function, tensor, file and line. There are more than collectives, so that one is always free.
CALLS, CALLS_AT = 56, 2560
DESCRIPTION = struct.Struct("=24s48s160s")

_SHARED_MEMORY = Path("/dev/shm")


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
    """How often a phase has ended, and the most seconds between two marks in it, with older phases counting less.

    Both may be some seconds old, and the seconds 5 % too many.
    """

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
        if len(data) == SIZE and data == again and _word(data, MARKS):
            return _beat(data)
    return None


def _beat(data: bytes) -> Beat:
    places = (NAMED_TIMES.unpack_from(data, PHASES_AT + place * NAMED_TIMES.size) for place in range(PHASES))
    phases = [(_text(name), Times(count, longest)) for count, longest, name in places]
    collectives = {}
    for place in range(COLLECTIVES):
        number, call = COLLECTIVE.unpack_from(data, COLLECTIVES_AT + place * COLLECTIVE.size)
        if number:
            collectives[number] = _collective(data, number, call // 2, bool(call % 2))
    call, entered = _word(data, CALL), _word(data, ENTERED)
    return Beat(
        pid=_word(data, PID),
        begun=BEGUN.unpack_from(data, BEGUN_AT)[0],
        marks=_word(data, MARKS),
        entered=entered,
        waiting=bool(_word(data, IS_WAITING)),
        step=_word(data, STEP),
        micro_batch=_word(data, MICRO_BATCH),
        phase=phases[_word(data, PHASE)][0],
        collective=None if call < 0 else _collective(data, entered, call, same_shape=False),
        times={name: times for name, times in phases if times.count},
        collectives=collectives,
    )


def _word(data: bytes, place: int) -> int:
    return int(WORD.unpack_from(data, place * WORD.size)[0])


def _collective(data: bytes, number: int, call: int, same_shape: bool) -> Collective:
    name, tensor, line = DESCRIPTION.unpack_from(data, CALLS_AT + call * DESCRIPTION.size)
    return Collective(number, _text(name), _text(tensor), _text(line), same_shape)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
