"""What makes a process slow, as far as its machine shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.machine.counters import find_low_clock
from trainwright.utils.text import format_bytes, format_plural

# Parts of the time from which something is a cause.
QUOTA, WAITED, STOLEN, DISK, MEMORY, HEAT, ASLEEP = 0.1, 0.1, 0.05, 0.1, 0.05, 0.05, 0.1
_OTHER_CORES = 0.1  # that other programs use
_PAGES = 50.0  # read from disk by second, because memory was short
_PAGE_SECONDS = 1e-4  # to read one, at least


@dataclass(frozen=True)
class Slowdown:
    """Something that makes a process slow.

    Attributes:
        kind: such as `quota`.
        share: the part of the time that it takes; 0 if that is not known.
    """

    kind: str
    share: float
    words: str


def find_causes(
    usage: Mapping[str, float],
    *,
    elsewhere: float = 0.0,
    sleeps: bool = True,
    planned_threads: float | None = None,
    gpu: Mapping[str, Any] | None = None,
) -> list[Slowdown]:
    """Return everything that made a process slow for a time, largest first; empty if nothing shows.

    Args:
        usage: what happened, see `Counters.since`; and the ``threads`` of each process, the ``processes`` of the run on
            this machine, the ``cores`` that they may use, and their ``clock`` and ``usual_clock``, if known.
        elsewhere: part of the time for which the process waited for other ranks.
        sleeps: whether it sleeps by itself, as one that waits for a GPU does; otherwise something stopped it.
        gpu: state of its GPU, see `gpu.asked`; None without one.
    """
    causes = [*_find_core_causes(usage), *_find_disk_causes(usage, elsewhere), *_find_clock_causes(usage, gpu)]
    if planned_threads is not None and usage.get("threads", planned_threads) < planned_threads:
        fewer = (
            f"{format_plural(int(usage['threads']), 'thread')} per process, where {planned_threads:.0f} were expected"
        )
        why = "OMP_NUM_THREADS is set, or there are fewer cores"
        causes.append(Slowdown("threads", 1 - usage["threads"] / planned_threads, f"{fewer}: {why}"))
    if not sleeps and "asleep" in usage:
        # What the hypervisor takes from a running process looks like sleep.
        explained_share = usage.get("stolen", 0.0) + sum(c.share for c in causes if c.kind in ("disk", "memory"))
        if (still := usage["asleep"] - elsewhere - explained_share) >= ASLEEP:
            words = f"the process did not run for {still:.0%} of the time: it was stopped, or waited for a device"
            causes.append(Slowdown("stopped", still, words))
    return sorted(causes, key=lambda cause: -cause.share)


def describe_causes(causes: Sequence[Slowdown]) -> str:
    """Return the causes as a part of a sentence."""
    return "; ".join(cause.words for cause in causes) or "no cause shows on its machine"


def _find_core_causes(usage: Mapping[str, float]) -> Iterator[Slowdown]:
    throttling, waiting, stolen = (usage.get(name, 0.0) for name in ("throttled", "waited", "stolen"))
    waiting *= 1 - usage.get("asleep", 0.0)  # of the whole time, not only of that in which it had work
    if throttling >= QUOTA:
        words = (
            f"the container's limit on CPU time stopped the process in {throttling:.0%} of its periods: it may use "
            "fewer cores than it sees"
        )
        yield Slowdown("quota", throttling, words)
    if stolen >= STOLEN:
        words = f"the host of this virtual machine gave {stolen:.0%} of its CPU time to others"
        yield Slowdown("hypervisor", stolen, words)
    if waiting >= WAITED:
        yield from _find_load_causes(usage, waiting, throttling >= QUOTA)


def _find_load_causes(usage: Mapping[str, float], waited: float, quota: bool) -> Iterator[Slowdown]:
    """Yield who used the cores for which the process waited."""
    other_cores = usage.get("other_cores")
    processes, threads, cores = (int(usage.get(name, 0)) for name in ("processes", "threads", "cores"))
    excess = max(0, processes * threads - cores) if cores else 0
    foreign = other_cores >= _OTHER_CORES if other_cores is not None else not excess
    part = 1.0 if not excess else (other_cores or 0.0) / ((other_cores or 0.0) + excess)
    for_a_core = f"the process waited for a core {waited:.0%} of the time"
    if foreign:
        detail = "" if other_cores is None else f", {other_cores:.1f} cores on average"
        yield Slowdown("load", waited * part, f"{for_a_core}: other programs use this machine{detail}")
    if excess:
        shortage = (
            f"{format_plural(processes, 'process', 'processes')} of {format_plural(threads, 'thread')} share "
            f"{format_plural(cores, 'core')}"
        )
        words = f"{for_a_core}: {shortage}; lower OMP_NUM_THREADS or parallel.num_processes"
        yield Slowdown("own threads", waited * (1 - part if foreign else 1.0), words)
    elif not foreign and not quota:  # which makes it wait, too
        yield Slowdown("load", waited, for_a_core)


def _find_disk_causes(usage: Mapping[str, float], elsewhere: float) -> Iterator[Slowdown]:
    asleep = max(0.0, usage["asleep"] - elsewhere) if "asleep" in usage else 1.0
    disk = min(usage.get("disk", 0.0), asleep)
    pages, swap_rate = usage.get("faults", 0.0), usage.get("swap_in", 0.0)
    if pages >= _PAGES:
        stall = max(usage.get("pressure_memory", 0.0), disk if swap_rate else 0.0, pages * _PAGE_SECONDS)
        if (share := min(stall, asleep)) >= MEMORY:
            read_again = f"{pages:.0f} pages per second were read from disk"
            if swap_rate:
                read_again += f", {format_bytes(round(swap_rate))} per second from swap"
            yield Slowdown("memory", share, f"memory is low: {read_again}")
            disk = disk - share  # the same waiting
    if disk >= DISK:
        yield Slowdown("disk", disk, f"the process waited for disks {disk:.0%} of the time")


def _find_clock_causes(usage: Mapping[str, float], gpu: Mapping[str, Any] | None) -> Iterator[Slowdown]:
    heat, times = usage.get("heat", 0.0), usage.get("heat_events", 0.0)
    if heat >= HEAT:
        yield Slowdown("heat", heat, f"heat slowed down its processors for {heat:.0%} of the time")
    elif times and not heat:  # the kernel counts how often, not for how long
        yield Slowdown("heat", 0.0, f"heat slowed down its processors {format_plural(int(times), 'time')}")
    elif gpu is None and 0 < (now := usage.get("clock", 0.0)) < (usual := usage.get("usual_clock", 0.0)):
        yield Slowdown(
            "clock", 1 - now / usual, f"its processors run at {now:.0f} MHz, below the usual {usual:.0f} MHz"
        )
    if gpu is not None and (low := find_low_clock(gpu)) is not None:
        yield Slowdown("GPU", *low)
