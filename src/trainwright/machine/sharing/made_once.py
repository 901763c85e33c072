"""Directories of the cache that one process makes for all that need them, on this machine and on others.

<parent>/<name>         complete, or not there
<parent>/<name>.lock    held by the process that makes it
<parent>/.<name>.<host>-<token>    what a process on this host makes, before it is renamed
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trainwright.machine.sharing.file_lock import lock_file
from trainwright.paths import retried, sync_tree

_Found = TypeVar("_Found")
_KEPT = "kept"  # the token of what a later call goes on with
# Locks may not reach other hosts, so what they have begun is theirs for so long.
_OLD_SECONDS = 24 * 3600.0


def made_once(
    directory: Path,
    find: Callable[[], _Found | None],
    make: Callable[[Path], object],
    *,
    goes_on: bool = False,
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
    found = retried(find)
    if found is not None:
        return found
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = directory.with_name(f"{directory.name}.lock")
    with lock_file(lock, f"waiting for another process that prepares {directory}") as alone:
        os.listdir(directory.parent)  # asks the server of a shared file system again
        found = retried(find)
        if found is not None:
            return found
        _remove_left(directory, alone=alone, keep=goes_on)
        token = _KEPT if alone and goes_on else secrets.token_hex(4)
        scratch = directory.with_name(f"{_prefix(directory)}{token}")
        complete = False
        try:
            make(scratch)
            complete = True
            sync_tree(scratch)
            return _published(scratch, directory, find)
        finally:
            if complete or token != _KEPT:
                shutil.rmtree(scratch, ignore_errors=True)


def remove_left_files(file: Path) -> None:
    """Remove what processes that were killed have left of writing ``file`` with `paths.write_file`.

    Call it while nobody else writes the file.
    """
    for left in file.parent.glob(f".{_literal(file.name)}.*"):
        with suppress(OSError):
            left.unlink()


def _published(made: Path, directory: Path, find: Callable[[], _Found | None]) -> _Found:
    """Rename what was made to ``directory``, unless another process was first."""
    try:
        made.rename(directory)
    except OSError:
        found = retried(find)
        if found is not None:
            return found
        if not os.path.lexists(directory):
            raise
        damaged = directory.with_name(f"{_prefix(directory)}{secrets.token_hex(4)}")
        directory.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)  # before the rename, after which nobody looks for what is left
        made.rename(directory)
    found = retried(find)
    if found is None:
        raise OSError(f"{directory} was made and is damaged or gone")
    return found


def _remove_left(directory: Path, *, alone: bool, keep: bool) -> None:
    """Remove what calls that were interrupted have left: those of this host if no other process of it is here now."""
    own = _prefix(directory)
    for left in directory.parent.glob(f".*{_literal(directory.name)}.*"):
        # `make` may write its directory by way of one with another dot before the name.
        name = f".{left.name.lstrip('.')}"
        if alone and name.startswith(own):
            is_left = not (keep and left.name == f"{own}{_KEPT}")
        else:
            is_left = name.startswith(f".{directory.name}.") and _age(left) > _OLD_SECONDS
        if is_left:
            shutil.rmtree(left, ignore_errors=True)


def _prefix(directory: Path) -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    return f".{directory.name}.{host}-"


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _age(left: Path) -> float:
    """Return the seconds since anything in a directory was changed."""
    newest = 0.0
    for folder, _, files in os.walk(left):
        for path in (folder, *(os.path.join(folder, name) for name in files)):
            with suppress(OSError):
                newest = max(newest, os.stat(path).st_mtime)
    return time.time() - newest if newest else 0.0
