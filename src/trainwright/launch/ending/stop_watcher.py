"""Workers that do not end after a stop request: some are suspended, others have nothing to save."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from trainwright.launch.ending.stop import BEFORE_FIRST_STEP, NEWEST, Stopping
from trainwright.text import say

# Time from the request until anything is forced: the first step may be over in a moment.
_FRESH_SECONDS = 5.0
# How long a process may be suspended after the request, and again after it was told to continue.
_STILL_SECONDS, _WOKEN_SECONDS = 3.0, 10.0


class StopWatcher:
    """Ensure that a stop ends a launch in bounded time. Call ``check`` repeatedly.

    Args:
        processes: pid of the worker of every rank.
    """

    def __init__(
        self,
        stopping: Stopping,
        processes: Callable[[], Mapping[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopping = stopping
        self._processes = processes
        self._clock = clock
        self._since: float | None = None  # when the request was seen
        self._still: dict[int, float] = {}  # by rank: the time since it was found suspended
        self._woken: dict[int, float] = {}

    def check(self) -> None:
        """Wake suspended workers (SIGSTOP), and end the launch if that does not help or nothing is lost."""
        if not self._stopping.flag.value:
            return
        now = self._clock()
        self._since = now if self._since is None else self._since
        if self._stopping.flags.fresh.value and now - self._since >= _FRESH_SECONDS:
            self._stopping.end(BEFORE_FIRST_STEP)
        for rank, pid in self._processes().items():
            if not _is_suspended(pid):
                self._still.pop(rank, None)
            elif now - self._still.setdefault(rank, now) >= _STILL_SECONDS:
                self._wake(rank, pid, now)

    def _wake(self, rank: int, pid: int, now: float) -> None:
        if rank not in self._woken:
            self._woken[rank] = now
            say(f"rank {rank} (process {pid}) is stopped; sending SIGCONT", file=sys.stderr)
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        elif now - self._woken[rank] >= _WOKEN_SECONDS:
            say(f"rank {rank} (process {pid}) does not continue, so all workers are killed", file=sys.stderr)
            self._stopping.end(NEWEST)


def _is_suspended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
