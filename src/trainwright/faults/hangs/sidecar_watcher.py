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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from trainwright.errors import EXIT_TRAINING, TrainingError
from trainwright.faults.hangs.evidence import keep_collectives, write_stacks_on_signal
from trainwright.faults.hangs.judge import conflict_of
from trainwright.faults.hangs.machines import Machines
from trainwright.faults.hangs.watcher import HangWatcher, WatchedRun
from trainwright.machine.usage.sample import process_age
from trainwright.run.shutdown.exit_code import record_exit_code
from trainwright.run.watchers import WatcherVerdict
from trainwright.utils.heartbeat_file import Beat, heartbeat_directory, heartbeat_file, read
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo
    from trainwright.run.worker_processes import WorkerRanks


_CHECK_SECONDS = 0.25
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
_END_SECONDS = 5.0
_TOLD = b"told"  # the worker has finished, or said why not
_TICK_SECONDS = 0.05  # of the clock that processes' ages are counted in


@contextmanager
def watching(run: Path, rank_info: RankInfo, terminal: TextIO, heard: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Have a process watch this machine's workers while the first of them trains.

    Args:
        terminal: where the process of rank 0's machine writes what it finds.
        heard: returns what was told of another rank's failure, so that this rank's own is not.

    Raises:
        TrainingError: training has failed, and workers here have entered different collectives, which breaks their
            connections.
    """
    process = _start(run, rank_info, terminal) if rank_info.local_rank == 0 else None
    started, is_told = time.monotonic() - process_age(), True
    try:
        yield
    except Exception as error:
        # Also of workers that have ended. All of this launch wait for each other before they begin.
        beats = {rank: beat for rank, beat in _beats(run, rank_info.size).items() if beat.started_at > started}
        conflict = conflict_of(beats)
        if conflict is None:
            raise
        is_told = not heard() or conflict.detail in heard()
        raise TrainingError(f"{conflict.detail}\n{type(error).__name__}: {error}") from error
    finally:
        if process is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(_TOLD if is_told else None, timeout=_END_SECONDS)


def _start(run: Path, rank_info: RankInfo, terminal: TextIO) -> subprocess.Popen[bytes]:
    watched = WatchedRun.of(run)
    request = [str(run.absolute()), watched.on_hang, watched.compiled, rank_info.size]
    alone = rank_info.local_size == rank_info.size
    code = "import sys; from trainwright.faults.hangs.sidecar_watcher import main; main(sys.argv[1])"
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps([*request, alone, rank_info.rank == 0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal.fileno(),
        start_new_session=True,  # ctrl-C is for the workers
    )


def main(request: str) -> None:
    """Watch until the worker that started this process ends."""
    for name in _IGNORED:  # schedulers send them to every process of a job
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    run, on_hang, compiled, size, alone, decides = json.loads(request)
    watched, parent = WatchedRun(Path(run), on_hang, compiled, restarts=False), os.getppid()

    def ending(code: int, message: str) -> None:
        record_exit_code(code, outweighs=True)
        if decides:
            say(f"error: {message}", file=sys.stderr)

    watcher = HangWatcher(
        watched, lambda: _workers(watched.run, size), None if alone else Machines(watched.run, size, decides), ending
    )
    is_told = True
    try:
        while os.getppid() == parent and not _is_readable(_CHECK_SECONDS):
            watcher.check()
        # If it was killed, processes that it has started may keep the pipe open.
        is_told = _is_readable(0) and os.read(sys.stdin.fileno(), len(_TOLD)) == _TOLD
    except WatcherVerdict:
        pass
    finally:
        conflict = watcher.close()
        if conflict is not None and not is_told:
            ending(EXIT_TRAINING, conflict)
        if (directory := heartbeat_directory(watched.run)) is not None:  # also of a run too short to be watched
            shutil.rmtree(directory, ignore_errors=True)


def _is_readable(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _workers(run: Path, size: int) -> dict[int, int]:
    """Return the pids of the workers on this machine by rank.

    A job that was killed with all its processes has left its heartbeats; other processes may have their pids now.
    """
    return {rank: beat.pid for rank, beat in _beats(run, size).items() if _is_of(beat)}


def _beats(run: Path, size: int) -> dict[int, Beat]:
    """Return what workers on this machine do or have done, by rank, also of earlier launches."""
    directory = heartbeat_directory(run)
    if directory is None:
        return {}
    beats = {}
    for file in directory.glob("rank-*"):
        rank = int(file.name.removeprefix("rank-"))
        if rank < size and (beat := read(heartbeat_file(directory, rank))) is not None:
            beats[rank] = beat
    return beats


def _is_of(beat: Beat) -> bool:
    """Return whether the process that has the pid of a heartbeat is the one that writes it: not younger."""
    try:
        return time.monotonic() - process_age(beat.pid) < beat.started_at + _TICK_SECONDS
    except psutil.Error:
        return False


class HangDetection:
    """A ``run.watchers.Watcher``."""

    def install(self, run: Path, rank: int) -> None:
        """Have torch keep this worker's collectives, and write its stacks on a signal."""
        keep_collectives(run / "logs", heartbeat_directory(run))
        write_stacks_on_signal(run / "logs", rank)

    def watch(self, run: Path, ranks: WorkerRanks, processes: Callable[[], Mapping[int, int]]) -> HangWatcher:
        """Return the watcher of the supervisor's workers."""
        machines = None if ranks.is_alone else Machines(run, ranks.size, not ranks.first)
        return HangWatcher(WatchedRun.of(run), processes, machines)

    def watch_beside(
        self, run: Path, rank_info: RankInfo, terminal: TextIO, received: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """Watch in a process beside the workers of this machine."""
        return watching(run, rank_info, terminal, received)


HANGS = HangDetection()
