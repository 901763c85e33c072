"""Time short calls, and detect those that other programs disturbed.

The kernel counts how long a runnable thread waits for a core (Linux, /proc/PID/task/TID/schedstat); on other systems
that is unknown, and the shortest of several times is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_TASKS = Path("/proc/self/task")
_DISTURBED = 0.03  # share of a time in which a thread waited for a core
_LEAST_SHARE = 0.5  # minimum share of a time that remains after subtracting waiting
_MOST_THREADS = 16  # threads that are read, at 3 us each


class Timed(NamedTuple):
    """Seconds of one call, and the longest time for which a thread of this process waited for a core."""

    seconds: float
    waited: float

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs disturbed the call."""
        return self.waited > _DISTURBED * self.seconds


class Stopwatch:
    """Time calls in this process. Call ``start`` after threads have been started."""

    def __init__(self) -> None:
        self._files: list[int] = []

    def start(self) -> None:
        """Find the current threads."""
        for file in self._files:
            os.close(file)
        self._files = []
        try:
            for task in sorted(_TASKS.iterdir())[:_MOST_THREADS]:
                self._files.append(os.open(task / "schedstat", os.O_RDONLY))
        except OSError:
            pass

    def time(self, run: Callable[[], object]) -> Timed:
        """Time one call."""
        before = self._waits()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        waits = [after - early for early, after in zip(before, self._waits(), strict=True)]
        return Timed(seconds, min(seconds, max(waits, default=0.0)))

    def _waits(self) -> list[float]:
        """Return the seconds that each thread has waited for a core so far."""
        seconds = []
        for file in self._files:
            try:
                seconds.append(int(os.pread(file, 100, 0).split()[1]) / 1e9)
            except (OSError, IndexError, ValueError):  # a thread that has ended
                seconds.append(0.0)
        return seconds


def choose_quantile(times: list[Timed], share: float) -> Timed:
    """Return the call that ``share`` of the undisturbed calls are faster than.

    If all are disturbed, as long calls are while another program uses the cores all the time, their waiting time is
    subtracted and the median is returned, still marked as disturbed.
    """
    clean = sorted(sample for sample in times if not sample.is_disturbed)
    if clean:
        return clean[int(share * len(clean))]
    corrected_times = sorted(Timed(max(t.seconds - t.waited, _LEAST_SHARE * t.seconds), t.waited) for t in times)
    return corrected_times[len(corrected_times) // 2]


def choose_shortest(times: list[Timed]) -> Timed:
    """Return the shortest undisturbed call, or the shortest if all are disturbed."""
    return min(times, key=lambda timed: (timed.is_disturbed, timed.seconds))
