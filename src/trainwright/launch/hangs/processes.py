"""What the kernel knows about a worker: whether it is suspended or waits for a disk or a core, and its CPU time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ProcessState:
    """The state of a process.

    Attributes:
        suspended: stopped by a signal or a debugger.
        on_disk: in an uninterruptible wait, normally for a disk or a network file system.
        used: seconds of CPU time of all its threads.
        starved: seconds for which its main thread was ready but had no core; 0 where the kernel does not count them.
    """

    suspended: bool
    on_disk: bool
    used: float
    starved: float


def state_of(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it has ended."""
    try:
        process = psutil.Process(pid)
        status, times = process.status(), process.cpu_times()
    except psutil.Error:
        return None
    if status == psutil.STATUS_ZOMBIE:
        return None
    suspended = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return ProcessState(suspended, status == psutil.STATUS_DISK_SLEEP, times.user + times.system, _starved(pid))


def seconds_asleep() -> float:
    """Return the seconds that the machine has been suspended since it was started."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


def _starved(pid: int) -> float:
    try:
        _, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(waited) / 1e9
