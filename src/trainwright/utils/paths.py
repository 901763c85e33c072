"""Paths as users write them, files that are written as a whole, and files in directories of others."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import BinaryIO, TypeVar

from trainwright.errors import RequestError
from trainwright.utils.text import quote_word

_LATE_SECONDS, _LOOK_SECONDS = 30.0, 0.2
_STALE_PAUSES = (0.0, 0.1, 0.4, 1.0)  # seconds before a stale file is opened again
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+")
_FILE_KINDS = (
    *((stat.S_ISLNK, "a link"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket")),
    *((stat.S_ISDIR, "a directory"), (stat.S_ISREG, "a file")),
)
_Read = TypeVar("_Read")


def expand_user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` and ``~user`` expanded.

    Raises:
        RequestError: there is no such user, or this user has no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = os.fspath(path).partition("/")[0].removeprefix("~")
        why = f"there is no user {name}" if name else "this user has no home directory"
        raise RequestError(f"{os.fspath(path)}: {why}; write the whole path instead of ~{name}") from None


def is_working_directory(path: str) -> bool:
    """Return whether an entry of ``sys.path`` is the working directory."""
    try:
        return not path or os.path.samefile(path, ".")
    except OSError:
        return False


def leave_out_working_directory() -> None:
    """Have Python not look for modules in the working directory, as ``python -m`` and empty parts of PYTHONPATH do.

    It may be anybody's folder, and a ``torch.py`` in it would be imported as torch; if it were the last one, still a
    module that a library tries to import and that is not installed. If PYTHONPATH or an installed package names it, it
    stays, as the last.
    """
    paths = [path for path in sys.path if not is_working_directory(path)]
    listed_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed_paths = dropwhile(lambda path: path != sysconfig.get_path("stdlib"), sys.path)
    if any(path and is_working_directory(path) for path in (*listed_paths, *installed_paths)):
        paths.append(os.getcwd())
    sys.path[:] = paths


def run_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a run, or of a directory of runs, as `expand_user_path` does.

    Raises:
        RequestError: it is the URL of a place for copies, or see `expand_user_path`.
    """
    expanded_path, url = expand_user_path(path), _URL.match(os.fspath(path))
    if url is None or expanded_path.exists():
        return expanded_path
    location = f"{url[1]}://{os.fspath(path)[url.end() :]}"  # a Path has only one of the slashes
    raise RequestError(
        f"{location} is a place for copies of runs, and this command needs a directory of this machine; use the run's "
        f"directory where it is trained, or go on with the run here: trainwright train --resume {quote_word(location)}"
    )


def write_file(file: Path, content: str | bytes) -> None:
    """Write ``file`` completely or not at all; text as UTF-8. Raises OSError."""
    scratch = file.with_name(f".{file.name}.{os.urandom(4).hex()}")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        scratch.replace(file)
    except OSError:
        with suppress(OSError):  # written in part if the disk is full
            scratch.unlink()
        raise


def open_inside(directory: Path, *names: str) -> BinaryIO:
    """Open a file in a directory that may be anybody's for reading: ``open_inside(run, "logs", "rank-0.log")``.

    Nothing is followed below ``directory``, and nothing that waits or has no end is opened.

    Raises:
        OSError: it does not exist, is no regular file or cannot be read, with a ``strerror`` for users.
    """
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name, is_kind in zip(names, [stat.S_ISDIR] * (len(names) - 1) + [stat.S_ISREG], strict=True):
            _check_kind(os.stat(name, dir_fd=at, follow_symlinks=False), is_kind)  # to open a device may do something
            inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
            os.close(at)
            at = inner
            _check_kind(os.fstat(at), is_kind)
        return os.fdopen(os.dup(at), "rb")
    finally:
        os.close(at)


def list_files_inside(directory: Path, folder: str) -> list[str]:
    """Return the names of the files in a folder of a directory that may be anybody's, without links and pipes, sorted;
    none if the folder does not exist or is a link.
    """
    try:
        at = os.open(directory / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return []
    try:
        with os.scandir(at) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    finally:
        os.close(at)


def _check_kind(status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(status.st_mode):
        kind = next((words for is_other, words in _FILE_KINDS if is_other(status.st_mode)), "a device")
        raise OSError(errno.EINVAL, f"is {kind}, not a {'file' if is_kind is stat.S_ISREG else 'directory'}")


def wait_for_text(file: Path, text: str, seconds: float = _LATE_SECONDS) -> bool:
    """Return whether ``file`` has this text, as soon as it has, or after ``seconds``.

    What another machine has written to a shared file system may be seen late: NFS keeps attributes and names that do
    not exist for up to a minute (nfs(5), acregmax and acdirmax), and a file that was replaced can be stale (ESTALE).
    """
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError, UnicodeDecodeError):
            os.listdir(file.parent)  # asks the server for the directory again
            if file.read_text(encoding="utf-8") == text:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)


def retry_stale(read: Callable[[], _Read]) -> _Read:
    """Return what ``read`` returns, which opens what it reads; call it again, at most four times, if that was stale.

    A file or directory that another machine replaces meanwhile is a stale handle on NFS (ESTALE); under its name there
    is a new one.

    Raises:
        OSError: any other, or it stays stale.
    """
    for pause in _STALE_PAUSES:
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause)
    return read()


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything in it to the disk. Raises OSError."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
