"""Processes that prepare what is in a cache which others use too, and may kill themselves at a chosen moment."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

# What is counted as a moment, if it is about something in the cache: each changes or reads the file system.
_MOMENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


def prepare_rows(
    rows: str,
    cache: str,
    kill_at: int | None = None,
    locks: bool = True,
    time: int | None = None,
    user: int | None = None,
) -> None:
    """Print the fingerprint, a digest of all tokens, whether they were made now, and how many moments it took.

    Args:
        kill_at: the moment at which to die by SIGKILL.
        locks: False: as on a file system without locks.
        time: seconds since 1970 that the rows are said to be from, so that the cache has another key for them.
        user: whose rights the process has.
    """
    import datasets  # noqa: F401 (another user may not be allowed to read all of it)

    from trainwright.data.stream.dataset_cache import prepare
    from trainwright.models.tokenization import build_bytes_tokenizer
    from trainwright.recipe.schema import DataSection

    tokenizer = build_bytes_tokenizer()
    if time is not None:
        os.utime(rows, (time, time))
    if user is not None:
        os.setuid(user)
    if not locks:
        fcntl.flock = _without_locks
    moments = _Moments(cache, kill_at)
    found = prepare(DataSection(train=rows), tokenizer, seed=0, cache=Path(cache))
    made = found.summary[-1].endswith("(made now)")
    content = hashlib.sha256(found.train.tokens.tobytes() + found.train.targets.tobytes()).hexdigest()
    print(found.train.fingerprint, content, int(made), moments.seen)


def make_files(cache: str, kill_at: int | None = None) -> None:
    """Make a directory of five files once, and print the same as `prepare_rows`."""
    from trainwright.machine.sharing import build_once

    directory, made = Path(cache) / "made", False

    def find() -> str | None:
        try:
            return "".join((directory / f"{n}").read_text() for n in range(5))
        except FileNotFoundError:
            return None

    def make(path: Path) -> None:
        nonlocal made
        made = True
        path.mkdir()
        for n in range(5):
            (path / f"{n}").write_text(f"{n}")

    moments = _Moments(cache, kill_at)
    print("made", build_once(directory, find, make), int(made), moments.seen)


class _Moments:
    """Counts the moments of this process, and ends it at one of them."""

    def __init__(self, below: str, kill_at: int | None) -> None:
        self.seen = 0
        self._below, self._kill_at = below, kill_at
        sys.addaudithook(self._at)

    def _at(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "fcntl.flock" or (event in _MOMENTS and str(args[0]).startswith(self._below)):
            self.seen += 1
            if self.seen == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def _without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
