"""A process that outlives this one by a moment, and kills whatever it has left running, however it ended.

What tests start has groups and sessions of its own, and the launchers among it are not meant to end with their
parent. So everything that a pytest process starts, directly or not, is known by a variable of its environment.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

MARK = "TRAINWRIGHT_TESTS"
_ROUNDS = 20  # a process may be starting another one while it is looked for


class Janitor:
    """Watches over this process from now on. ``directory`` is removed in the end."""

    def __init__(self, directory: Path | None) -> None:
        os.environ[MARK] = mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, __file__, mark, str(os.getpid()), *([str(directory)] if directory else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals to this process's group are not for it
        )

    def close(self) -> None:
        """Have it kill what is left now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have ``mark``, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or of another user
    return found


def main(mark: str, parent: int, directory: str | None = None) -> None:
    """Wait for the end of ``parent``, then kill all that have ``mark``."""
    # Nothing is written: the pipe is readable when its other end is closed. A forked process may have that end as well.
    while os.getppid() == parent and not select.select([0], [], [], 1.0)[0]:
        pass
    for _ in range(_ROUNDS):
        if not (left := marked(mark)):
            break
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, 1)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
