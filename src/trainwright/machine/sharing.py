"""Directories and files that processes share: made by one of them for all, or locked while one uses them.

<parent>/<name>                    complete, or not there
<parent>/<name>.lock               held by the process that makes it
<parent>/.<name>.<host>-<token>    what a process on this host makes, before it is renamed
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from trainwright.errors import RequestError
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import retry_stale, sync_tree

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
    descriptor = _acquire_lock(directory, refusal, time.monotonic() + patience)
    try:
        yield
    finally:
        os.close(descriptor)
        _remove_unused(directory / LOCK)


def _acquire_lock(directory: Path, refusal: str, deadline: float) -> int:
    """Return a descriptor that holds the lock of ``directory``."""
    for _ in range(_ATTEMPTS):
        try:
            descriptor = retry_stale(lambda: _open_lock_file(directory / LOCK))
        except OSError:
            break
        _wait(descriptor, refusal, deadline)
        if _is_open(directory / LOCK, descriptor):
            _sign_lock(descriptor)
            return descriptor
        os.close(descriptor)  # another process has removed the file meanwhile
    descriptor = os.open(directory, os.O_RDONLY)
    _wait(descriptor, refusal, deadline)
    return descriptor


def _wait(descriptor: int, refusal: str, deadline: float) -> None:
    try:
        while _try_to_lock(descriptor) is False:  # where there are no locks, a run must be possible
            if time.monotonic() >= deadline:
                raise _build_locked_error(descriptor, refusal)
            time.sleep(_LOOKS)
    except BaseException:
        os.close(descriptor)
        raise


def _sign_lock(descriptor: int) -> None:
    """Write into the file of a lock which machine holds it."""
    with suppress(OSError):  # another user's file, or a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _identify_machine().encode(), 0)
        os.fsync(descriptor)  # a machine that is lost has told the others


def _build_locked_error(descriptor: int, refusal: str) -> Locked:
    try:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
    except OSError:  # a directory that is locked itself
        holder = ""
    return Locked(refusal, holder.partition(" ")[0], is_elsewhere=holder not in ("", _identify_machine()))


def _identify_machine() -> str:
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
            if _try_to_lock(descriptor) and _is_open(file, descriptor):
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
        return _try_to_lock(descriptor, fcntl.LOCK_SH) is False
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
    descriptor, pause = retry_stale(lambda: _open_lock_file(file)), 0.0
    try:
        while (is_taken := _try_to_lock(descriptor)) is False:
            if not pause:
                begin_activity(waiting)
            pause = min(max(2 * pause, _LOOKS), _LONGEST_LOOKS)
            time.sleep(pause)
        if pause:
            begin_activity("")
        yield is_taken is True
    finally:
        os.close(descriptor)


def _open_lock_file(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user's
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)


def _try_to_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
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


_Found = TypeVar("_Found")
_KEPT = "kept"  # the token of what a later call goes on with
# Locks may not reach other hosts, so what they have begun is theirs for so long.
_OLD_SECONDS = 24 * 3600.0


def build_once(
    directory: Path, find: Callable[[], _Found | None], make: Callable[[Path], object], *, goes_on: bool = False
) -> _Found:
    """Return what ``find`` finds in ``directory``; if that is nothing, call ``make`` in one process, then find it.

    The others wait. On a file system whose locks do not reach other hosts, or that has none, several may make it; the
    first one's is kept. Wherever a process is killed, ``directory`` is complete or not there, and what was begun is
    removed by the next process of the same host that makes it, or a day later by any. A directory in which something
    is found is never changed.

    Args:
        find: returns None if the directory is missing or damaged. It raises other errors of the file system: what
            cannot be read now may be in use elsewhere.
        make: called with the path of a directory to create; files are flushed to the disk afterwards.
        goes_on: whether ``make`` goes on with what an interrupted call on this host has left.

    Raises:
        OSError: the directory cannot be read or made.
    """
    existing = retry_stale(find)
    if existing is not None:
        return existing
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = directory.with_name(f"{directory.name}.lock")
    with lock_file(lock, f"waiting for another process that prepares {directory}") as alone:
        os.listdir(directory.parent)  # asks the server of a shared file system again
        existing = retry_stale(find)
        if existing is not None:
            return existing
        _remove_remnants(directory, alone=alone, keep=goes_on)
        token = _KEPT if alone and goes_on else os.urandom(4).hex()
        scratch = directory.with_name(f"{_build_prefix(directory)}{token}")
        complete = False
        try:
            make(scratch)
            complete = True
            sync_tree(scratch)
            return _publish_directory(scratch, directory, find)
        finally:
            if complete or token != _KEPT:
                shutil.rmtree(scratch, ignore_errors=True)


def remove_remnants(file: Path) -> None:
    """Remove what processes that were killed have left of writing ``file`` with `paths.write_file`.

    Call it while nobody else writes the file.
    """
    for remnant in file.parent.glob(f".{_escape_pattern(file.name)}.*"):
        with suppress(OSError):
            remnant.unlink()


def _publish_directory(scratch: Path, directory: Path, find: Callable[[], _Found | None]) -> _Found:
    """Rename what was made to ``directory``, unless another process was first."""
    try:
        scratch.rename(directory)
    except OSError:
        existing = retry_stale(find)
        if existing is not None:
            return existing
        if not os.path.lexists(directory):
            raise
        trash = directory.with_name(f"{_build_prefix(directory)}{os.urandom(4).hex()}")
        directory.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)  # before the rename, after which nobody looks for what is left
        scratch.rename(directory)
    existing = retry_stale(find)
    if existing is None:
        raise OSError(f"{directory} was made and is damaged or gone")
    return existing


def _remove_remnants(directory: Path, *, alone: bool, keep: bool) -> None:
    """Remove what calls that were interrupted have left: those of this host if no other process of it is here now."""
    prefix = _build_prefix(directory)
    for remnant in directory.parent.glob(f".*{_escape_pattern(directory.name)}.*"):
        # `make` may write its directory by way of one with another dot before the name.
        name = f".{remnant.name.lstrip('.')}"
        if alone and name.startswith(prefix):
            is_left = not (keep and remnant.name == f"{prefix}{_KEPT}")
        else:
            is_left = name.startswith(f".{directory.name}.") and _measure_age(remnant) > _OLD_SECONDS
        if is_left:
            shutil.rmtree(remnant, ignore_errors=True)


def _build_prefix(directory: Path) -> str:
    return f".{directory.name}.{read_host_name()}-"


def read_host_name() -> str:
    """Return the name of this machine as a part of file names."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


def _escape_pattern(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _measure_age(remnant: Path) -> float:
    """Return the seconds since anything in a directory was changed."""
    newest = 0.0
    for folder, _, files in os.walk(remnant):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(OSError):
                newest = max(newest, os.stat(path).st_mtime)
    return time.time() - newest if newest else 0.0
