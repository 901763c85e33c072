"""Lock directories that only one process may use at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainwright.errors import RequestError

_LOOKS = 0.05  # seconds between attempts
# File systems of several machines may have no locks, or no server for them now.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def lock_directory(directory: Path, refusal: str, patience: float = 0.0) -> Iterator[None]:
    """Lock ``directory``, which must exist; nothing is written, and a killed process releases the lock.

    Processes that are forked meanwhile hold the lock too until they end. On a file system without locks nothing is
    locked.

    Args:
        refusal: the message if another process holds the lock.
        patience: seconds to wait for it.

    Raises:
        RequestError: ``refusal``.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if not _locked(descriptor, time.monotonic() + patience):
            raise RequestError(refusal)
        yield
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Return whether a process has locked ``directory``. Raises OSError if it cannot be opened."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return False


def _locked(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOKS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return True  # a run must be possible there
