"""What the kernel knows about a worker: whether it is suspended or waits for a disk or a core, and its CPU time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_BYTES_PER_SECOND = 64 * 2**10  # a process that moves fewer does not read or write a model
_READ = 16  # `bytes_moved` counts one byte for each 16 that were read, but not from storage


@dataclass(frozen=True)
class ProcessState:
    """The state of a process.

    Attributes:
        suspended: stopped by a signal, while the process that started it runs.
        paused: held by a debugger, or stopped together with the process that started it: somebody wants it so.
        on_disk: in an uninterruptible wait, normally for a disk or a network file system.
        used: seconds of CPU time of all its threads.
        waited: seconds for which a thread was ready but had no core, by thread; empty where the kernel does not count.
    """

    suspended: bool
    paused: bool
    on_disk: bool
    used: float
    waited: Mapping[int, float]

    def starved(self, before: ProcessState) -> float:
        """Return the most seconds since ``before`` for which one of its threads was ready but had no core."""
        known = self.waited.keys() & before.waited.keys()
        return max((self.waited[thread] - before.waited[thread] for thread in known), default=0.0)


def state_of(pid: int, *, closely: bool = False) -> ProcessState | None:
    """Return the state of a process; None if it has ended.

    Args:
        closely: look at all threads, which takes milliseconds where there are many; else at the main one.
    """
    try:
        process = psutil.Process(pid)
        status, times = process.status(), process.cpu_times()
        stopped = status == psutil.STATUS_STOPPED
        paused = status == psutil.STATUS_TRACING_STOP or (stopped and _is_stopped(process.parent()))
    except psutil.Error:
        return None
    if status == psutil.STATUS_ZOMBIE:
        return None
    on_disk = status == psutil.STATUS_DISK_SLEEP
    return ProcessState(stopped and not paused, paused, on_disk, times.user + times.system, _waited(pid, closely))


def bytes_moved(pid: int) -> int:
    """Return the bytes that a process and those that it has started have written, and read from storage, so far.

    Of what was read otherwise a part is added: it is from caches, file systems that do not tell, or from /proc, where
    the ledger of a rank reads some 20 KB every second.
    """
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error, AttributeError, OSError):  # it has ended, or the system does not count
                counted = each.io_counters()
                total += int(counted.write_chars + counted.read_bytes + counted.read_chars // _READ)
    return total


class Moving:
    """Whether a process reads or writes a model; the ledger of a rank writes some bytes all the time."""

    def __init__(self) -> None:
        self._moved: int | None = None
        self._seconds = 0.0

    def __call__(self, pid: int, passed: float) -> bool:
        """Return whether it has moved the bytes of a model since it last did; ``passed``: seconds since the last call.

        The first call returns True.
        """
        moved, self._seconds = bytes_moved(pid), self._seconds + passed
        if self._moved is not None and moved - self._moved < _BYTES_PER_SECOND * max(1.0, self._seconds):
            return False
        self._moved, self._seconds = moved, 0.0
        return True


def seconds_asleep() -> float:
    """Return the seconds that the machine has been suspended since it was started."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def _is_stopped(process: psutil.Process | None) -> bool:
    return process is not None and process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _waited(pid: int, closely: bool) -> dict[int, float]:
    tasks = Path(f"/proc/{pid}/task")
    found: dict[int, float] = {}
    for thread in _threads(tasks) if closely else (pid,):
        with suppress(OSError, ValueError):
            _, waited, _ = (tasks / str(thread) / "schedstat").read_text(encoding="ascii").split()
            found[thread] = int(waited) / 1e9
    return found


def _threads(tasks: Path) -> Iterable[int]:
    try:
        return [int(task.name) for task in tasks.iterdir()]
    except OSError:
        return []
