"""Times of short work, and which of them were spoilt by something else that had the cores meanwhile.

A thread that is ready to run and does not is counted by the kernel (Linux, /proc/PID/task/TID/schedstat); elsewhere
nothing is known, and the least of several times has to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_TASKS = Path("/proc/self/task")
_SPOILT = 0.03  # of a time, in which a thread waited for a core
_LEAST_SHARE = 0.5  # of a time, that is left of it whatever was waited
_MOST_THREADS = 16  # that are looked at: reading takes 3 us a thread


class Timed(NamedTuple):
    """Seconds of one call, and those of them in which the thread of this process that waited most waited for a core."""

    seconds: float
    waited: float

    @property
    def is_spoilt(self) -> bool:
        """Return whether other programs disturbed the measurement."""
        return self.waited > _SPOILT * self.seconds


class Stopwatch:
    """Times calls in this process. Its threads are looked up by ``look``, to be called when they have been started."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def look(self) -> None:
        """Find the threads that there are now."""
        for file in self._files:
            os.close(file)
        self._files = []
        try:
            for task in sorted(_TASKS.iterdir())[:_MOST_THREADS]:
                self._files.append(os.open(task / "schedstat", os.O_RDONLY))
        except OSError:
            pass

    def time(self, run: Callable[[], object]) -> Timed:
        """Of one call."""
        before = self._waits()
        begun = time.perf_counter()
        run()
        seconds = time.perf_counter() - begun
        waits = [after - early for early, after in zip(before, self._waits(), strict=True)]
        return Timed(seconds, min(seconds, max(waits, default=0.0)))

    def _waits(self) -> list[float]:
        """Seconds that each thread has waited for a core so far."""
        found = []
        for file in self._files:
            try:
                found.append(int(os.pread(file, 100, 0).split()[1]) / 1e9)
            except (OSError, IndexError, ValueError):  # a thread that has ended
                found.append(0.0)
        return found


def undisturbed(times: list[Timed], share: float) -> Timed:
    """Of several calls the one that ``share`` of them are faster than, spoilt ones left out.

    Where all are spoilt, as long ones are beside a program that always wants the cores, what they waited is taken off
    and the middle one counts; it is marked as spoilt all the same.
    """
    clean = sorted(one for one in times if not one.is_spoilt)
    if clean:
        return clean[int(share * len(clean))]
    mended = sorted(Timed(max(one.seconds - one.waited, _LEAST_SHARE * one.seconds), one.waited) for one in times)
    return mended[len(mended) // 2]


def least(times: list[Timed]) -> Timed:
    """Return the shortest of those that nothing has spoilt; where all were, the shortest."""
    return min(times, key=lambda one: (one.is_spoilt, one.seconds))
