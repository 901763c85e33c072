"""What was read of long runs, kept in the cache: to read their events whole takes seconds for each run."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from trainwright.machine.cache import cache_root, try_write
from trainwright.observe.following import EVENTS, RunFollower
from trainwright.paths import open_inside

_LONG_BYTES = 2**22  # less is read again in no time
_END_BYTES = 2**12
_OLD_SECONDS = 90 * 86400.0


def follower_of(directory: Path) -> RunFollower:
    """Return a follower of a run, which has what was read of it before if the file has only grown since then."""
    kept = _file_of(directory)
    try:
        identity, _, state = kept.read_bytes().partition(b"\n")
        found = RunFollower.restored(directory, state)
        if identity != _identity(directory, found.read_bytes, identity.split(b" ")[0]):
            return RunFollower(directory)
        os.utime(kept)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return RunFollower(directory)
    return found


def keep(follower: RunFollower, before: int) -> int:
    """Keep what was read, if it is much more than the ``before`` bytes that are kept; return how many are."""
    if follower.read_bytes - before < _LONG_BYTES:
        return before
    with suppress(OSError):  # of a run that was deleted meanwhile
        identity = _identity(follower.directory, follower.read_bytes)
        _forget_old()
        try_write(_file_of(follower.directory), identity + b"\n" + follower.state())
    return follower.read_bytes


def read_run(directory: Path) -> RunFollower:
    """Return all that a run's events say. Raises OSError if they cannot be read."""
    found = follower_of(directory)
    before = found.read_bytes
    found.look()
    keep(found, before)
    return found


def _identity(directory: Path, size: int, moment: bytes | None = None) -> bytes:
    """Return what tells whether the first ``size`` bytes of a file are the same.

    Args:
        moment: the time of its last change before, which does not count if it has grown since then.
    """
    with open_inside(directory, EVENTS) as file:
        status = os.fstat(file.fileno())
        first = file.read(min(size, _END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        last = file.read(min(size, _END_BYTES))
    grown = moment is not None and status.st_size > size
    shown = moment if grown and moment is not None else str(status.st_mtime_ns).encode()
    digest = hashlib.sha256(first + last).hexdigest() if status.st_size >= size else "shorter"
    return b" ".join((shown, str(status.st_ino).encode(), digest.encode()))


def _file_of(directory: Path) -> Path:
    return _folder() / hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]


def _folder() -> Path:
    return cache_root() / "events"


def _forget_old() -> None:
    """Remove what has not been used for long."""
    with suppress(OSError):
        for file in _folder().iterdir():
            if time.time() - file.stat().st_mtime > _OLD_SECONDS:
                file.unlink(missing_ok=True)
