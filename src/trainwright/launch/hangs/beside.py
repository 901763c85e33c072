"""Watch the workers that another launcher started, in a process beside those of this machine.

It ends when the worker that started it closes its standard input, or has ended.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from trainwright.beats import Beat, heartbeat_directory, heartbeat_file, read
from trainwright.errors import EXIT_FAULT
from trainwright.launch.ending.exit_code import record_exit_code
from trainwright.launch.hangs.machines import Machines
from trainwright.launch.hangs.watcher import HangWatcher, RunHangs, Watched
from trainwright.launch.run_directory import RECIPE
from trainwright.machine.usage.sample import process_age
from trainwright.recipe.loading import load_recipe
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo

_CHECK_SECONDS = 0.25
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_END_SECONDS = 5.0
_TICK_SECONDS = 0.05  # of the clock that processes' ages are counted in


@contextmanager
def watching(run: Path, rank_info: RankInfo, terminal: TextIO) -> Iterator[None]:
    """Have a process watch this machine's workers while the first of them trains; the others do nothing here.

    Args:
        terminal: where the process of rank 0's machine writes what it finds.
    """
    if rank_info.local_rank != 0:
        yield
        return
    recipe = load_recipe(run / RECIPE)
    alone = rank_info.local_size == rank_info.size
    watched = (str(run.absolute()), recipe.faults.on_hang, recipe.train.compile is True)
    code = "import sys; from trainwright.launch.hangs.beside import main; main(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([*watched, rank_info.size, alone, rank_info.rank == 0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        start_new_session=True,  # ctrl-C is for the workers
    )
    try:
        yield
    finally:
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)


def main(request: str) -> None:
    """Watch until the worker that started this process ends."""
    for name in _IGNORED:  # schedulers send them to every process of a job
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    run, on_hang, compiled, size, alone, decides = json.loads(request)
    watched, parent = Watched(Path(run), on_hang, compiled), os.getppid()

    def ending(message: str) -> None:
        record_exit_code(EXIT_FAULT)
        if decides:
            say(f"error: {message}", file=sys.stderr)

    watcher = HangWatcher(
        watched, lambda: _workers(watched.run, size), None if alone else Machines(watched.run, size, decides), ending
    )
    try:
        while os.getppid() == parent and not select.select([sys.stdin], [], [], _CHECK_SECONDS)[0]:
            watcher.check()
    except RunHangs:
        pass
    finally:
        watcher.close()
        if (directory := heartbeat_directory(watched.run)) is not None:  # also of a run too short to be watched
            shutil.rmtree(directory, ignore_errors=True)


def _workers(run: Path, size: int) -> dict[int, int]:
    """Return the pids of the workers on this machine by rank.

    A job that was killed with all its processes has left its heartbeats; other processes may have their pids now.
    """
    directory = heartbeat_directory(run)
    if directory is None:
        return {}
    found = {}
    for file in directory.glob("rank-*"):
        rank = int(file.name.removeprefix("rank-"))
        if rank < size and (beat := read(heartbeat_file(directory, rank))) is not None and _is_of(beat):
            found[rank] = beat.pid
    return found


def _is_of(beat: Beat) -> bool:
    """Return whether the process that has the pid of a heartbeat is the one that writes it: not younger."""
    try:
        return time.monotonic() - process_age(beat.pid) < beat.begun + _TICK_SECONDS
    except psutil.Error:
        return False
