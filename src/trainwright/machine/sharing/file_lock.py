"""Lock directories and files that only one process may use at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainwright.activity import doing
from trainwright.errors import RequestError
from trainwright.paths import retried

LOCK = ".lock"  # in a directory: on NFS, locks of directories do not reach other machines, and those of files do
_LOOKS, _LONGEST_LOOKS = 0.05, 0.5  # seconds between attempts
_ATTEMPTS = 1000  # on a file system that identifies the same file differently each time, this ends
# File systems of several machines may have no locks, or no server for them now; NFS needs a file that may be written.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # pods on different machines may have the same host name


class Locked(RequestError):
    """Another process holds a lock.

    Attributes:
        holder: the host name of its machine, "" if it is not known.
        is_elsewhere: whether that is known to be another machine, or this one before it was started again.
    """

    def __init__(self, message: str, holder: str = "", *, is_elsewhere: bool = False) -> None:
        super().__init__(message)
        self.holder, self.is_elsewhere = holder, is_elsewhere


@contextmanager
def lock_directory(directory: Path, refusal: str, patience: float = 0.0) -> Iterator[None]:
    """Lock ``directory``, which must exist, by its file `LOCK`; a killed process releases the lock.

    Processes that are forked meanwhile hold the lock too until they end. The file names their machine, and is
    removed when the last one leaves, unless it is killed. A directory in which no file can be created is locked itself.
    On a file system without locks nothing is locked.

    Args:
        refusal: the message if another process holds the lock.
        patience: seconds to wait for it.

    Raises:
        Locked: ``refusal``.
    """
    descriptor = _locked(directory, refusal, time.monotonic() + patience)
    try:
        yield
    finally:
        os.close(descriptor)
        _remove_unused(directory / LOCK)


def _locked(directory: Path, refusal: str, deadline: float) -> int:
    """Return a descriptor that holds the lock of ``directory``."""
    for _ in range(_ATTEMPTS):
        try:
            descriptor = retried(lambda: _opened(directory / LOCK))
        except OSError:
            break
        _wait(descriptor, refusal, deadline)
        if _is_open(directory / LOCK, descriptor):
            _sign(descriptor)
            return descriptor
        os.close(descriptor)  # another process has removed the file meanwhile
    descriptor = os.open(directory, os.O_RDONLY)
    _wait(descriptor, refusal, deadline)
    return descriptor


def _wait(descriptor: int, refusal: str, deadline: float) -> None:
    try:
        while _taken(descriptor) is False:  # where there are no locks, a run must be possible
            if time.monotonic() >= deadline:
                raise _locked_by(descriptor, refusal)
            time.sleep(_LOOKS)
    except BaseException:
        os.close(descriptor)
        raise


def _sign(descriptor: int) -> None:
    """Write into the file of a lock which machine holds it."""
    with suppress(OSError):  # another user's file, or a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _this_machine().encode(), 0)
        os.fsync(descriptor)  # a machine that is lost has told the others


def _locked_by(descriptor: int, refusal: str) -> Locked:
    try:
        found = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
    except OSError:  # a directory that is locked itself
        found = ""
    return Locked(refusal, found.partition(" ")[0], is_elsewhere=found not in ("", _this_machine()))


def _this_machine() -> str:
    try:
        boot = _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def _is_open(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_unused(file: Path) -> None:
    """Remove the file of a lock that no process holds."""
    with suppress(OSError):
        descriptor = os.open(file, os.O_RDWR)
        try:
            if _taken(descriptor) and _is_open(file, descriptor):
                file.unlink()
        finally:
            os.close(descriptor)


def remove_locked(directory: Path) -> None:
    """Remove a directory that this process has locked, and that has no other files. Raises OSError if it has."""
    (directory / LOCK).unlink(missing_ok=True)
    directory.rmdir()


def is_locked(directory: Path) -> bool:
    """Return whether a process has locked ``directory``, which may be anybody's.

    Raises OSError if it cannot be opened.
    """
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # there is none, or another user's, or a link
        descriptor = os.open(directory, os.O_RDONLY)
    try:
        return _taken(descriptor, fcntl.LOCK_SH) is False
    finally:
        os.close(descriptor)


@contextmanager
def lock_file(file: Path, waiting: str) -> Iterator[bool]:
    """Hold the lock of ``file``, which is created and stays, once no other process does; a killed one releases it.

    Args:
        waiting: what is shown while another process holds it.

    Returns:
        Whether the lock is held; False on a file system without locks.

    Raises:
        OSError: the file cannot be created.
    """
    descriptor, pause = retried(lambda: _opened(file)), 0.0
    try:
        while (held := _taken(descriptor)) is False:
            if not pause:
                doing(waiting)
            pause = min(max(2 * pause, _LOOKS), _LONGEST_LOOKS)
            time.sleep(pause)
        if pause:
            doing("")
        yield held is True
    finally:
        os.close(descriptor)


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user's
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _taken(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Return whether the lock could be taken now; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
