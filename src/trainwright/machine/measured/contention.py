"""Time that this process was kept from computing by other programs, a limit on its cores, or the hypervisor.

Read from the kernel's counters (Linux); unknown on other systems.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainwright.machine.cgroups import iterate_groups, read_text

_STEAL = 7  # of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5))


@dataclass(frozen=True)
class CpuContention:
    """The counters at one moment.

    ``ran`` and ``waited``: nanoseconds that each thread ran, and was runnable while others used the cores. ``periods``:
    for each control group, its number of periods, and in how many its quota was exhausted. ``stolen`` and ``all``:
    ticks of all cores that the hypervisor gave to others, and all ticks.
    """

    ran: Mapping[str, int]
    waited: Mapping[str, int]
    periods: Mapping[str, tuple[int, int]]
    stolen: int
    all: int

    @classmethod
    def now(cls, root: Path = Path("/"), *, all_threads: bool = True) -> CpuContention:
        """Read the counters of the kernel.

        Args:
            root: the directory of /proc and /sys.
            all_threads: false counts the main thread only, which is faster.
        """
        process = root / "proc/self"
        tasks = _list_directory(process / "task") if all_threads else [process]
        threads = {task.name: counts for task in tasks if (counts := _read_numbers(task / "schedstat"))}
        ticks = [int(word) for word in read_text(root / "proc/stat").partition("\n")[0].split()[1:]]
        return cls(
            ran={name: counts[0] for name, counts in threads.items()},
            waited={name: counts[1] for name, counts in threads.items()},
            periods=dict(_read_periods(root)),
            stolen=ticks[_STEAL] if len(ticks) > _STEAL else 0,
            all=sum(ticks[: _STEAL + 1]),
        )

    def since(self, before: CpuContention) -> dict[str, float]:
        """Return shares, from 0 to 1, since ``before``; values that the kernel does not count are omitted.

        ``waited``: of the time in which the process had work to do. ``throttled``: of the periods of its control group.
        ``stolen``: of the time of all cores.
        """
        ran, wait = _sum_increases(self.ran, before.ran), _sum_increases(self.waited, before.waited)
        shares = {"waited": wait / (ran + wait)} if ran + wait > 0 else {}
        parts = []
        for group, (periods, throttles) in self.periods.items():
            first = before.periods.get(group, (0, 0))
            if periods > first[0]:
                parts.append((throttles - first[1]) / (periods - first[0]))
        if parts:
            shares["throttled"] = max(parts)
        if self.all > before.all:
            shares["stolen"] = (self.stolen - before.stolen) / (self.all - before.all)
        return shares

    def find_longest_wait(self, before: CpuContention) -> float:
        """Return the largest share of its runnable time that a thread spent waiting for a core since ``before``.

        Threads with less than half of the runnable time of the busiest one do not count.
        """
        waits = {name: count - before.waited.get(name, 0) for name, count in self.waited.items()}
        work = {name: wait + self.ran[name] - before.ran.get(name, 0) for name, wait in waits.items()}
        most = max(work.values(), default=0)
        return max((waits[name] / busy for name, busy in work.items() if busy > 0 and 2 * busy >= most), default=0.0)


def count_usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_other_cores(seconds: float) -> float:
    """Return how many cores programs other than this process and its children use on average, in ``seconds``."""
    import psutil

    before = _measure_own_seconds()
    busy = psutil.cpu_percent(seconds) / 100 * (psutil.cpu_count() or 1)
    return max(0.0, busy - (_measure_own_seconds() - before) / seconds)


def _measure_own_seconds() -> float:
    """Return the processor time of this process and those that it has started."""
    import psutil

    process, seconds = psutil.Process(), 0.0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            times = member.cpu_times()
            seconds += times.user + times.system
    return seconds


def _sum_increases(after: Mapping[str, int], before: Mapping[str, int]) -> int:
    return sum(value - before.get(name, 0) for name, value in after.items())


def _list_directory(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _read_numbers(file: Path) -> list[int]:
    return [int(word) for word in read_text(file).split()]


@functools.cache  # looking for it takes longer than reading it
def _list_groups(root: Path) -> tuple[Path, ...]:
    return tuple(group for group, _ in iterate_groups("cpu", root))


def _read_periods(root: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the periods of this process's control group and its ancestors (cgroup-v2.rst, sched-bwc.rst)."""
    for group in _list_groups(root):
        counts = dict(line.split(maxsplit=1) for line in read_text(group / "cpu.stat").splitlines())
        if {"nr_periods", "nr_throttled"} <= counts.keys():
            yield str(group), (int(counts["nr_periods"]), int(counts["nr_throttled"]))
