"""Why a process is slower than the others of its run, as far as the system shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from trainwright.machine.measured.contention import CpuContention
from trainwright.machine.usage.sample import gpu_of, processor_clock

# A share of the time below this is no reason for being slow.
_NOTABLE = 0.1
# A clock is low below this part of the highest one.
_LOW_CLOCK = 0.8


@dataclass(frozen=True)
class Moment:
    """Counters of this thread and its machine.

    Attributes:
        wall: seconds on the host's clock.
        ran: seconds for which the thread ran.
        disk: seconds for which processors had nothing to do but to wait for disks, on average.
    """

    wall: float
    ran: float
    disk: float
    contention: CpuContention

    @classmethod
    def now(cls) -> Moment:
        """Read the counters."""
        disk = float(getattr(psutil.cpu_times(), "iowait", 0.0)) / (psutil.cpu_count() or 1)
        return cls(time.monotonic(), time.thread_time(), disk, CpuContention.now())


def why_slow(before: Moment, now: Moment, waited: float, gpu: str | None = None) -> str:
    """Return what kept this thread from working between two moments.

    Args:
        waited: seconds in which it waited for other ranks.
        gpu: PCI address of the GPU that it uses.
    """
    wall, shares = now.wall - before.wall, now.contention.since(before.contention)
    disk = (now.disk - before.disk) / wall
    parts = [
        (shares.get("throttled", 0.0), "the quota of its control group was used up in {share:.0%} of the periods"),
        (shares.get("waited", 0.0), "it waited for a processor, which others used, for {share:.0%} of the time"),
        (shares.get("stolen", 0.0), "the hypervisor gave {share:.0%} of its processors' time to others"),
        (disk, "its machine waited for disks for {share:.0%} of the time"),
    ]
    if gpu is None:
        still = (wall - waited - (now.ran - before.ran)) / wall - sum(share for share, _ in parts)
        parts.append((still, "it did not run for {share:.0%} of the time: it was stopped, or waited for a device"))
    found = [words.format(share=share) for share, words in sorted(parts, reverse=True) if share > _NOTABLE]
    clock = processor_clock()
    if clock is not None and clock[0] < _LOW_CLOCK * clock[1]:
        found.append(f"its processors run at {clock[0]:.0f} of {clock[1]:.0f} MHz")
    if gpu is not None:
        state = gpu_of(gpu)
        now_at, most = state.get("clock"), state.get("highest_clock")
        if now_at and most and now_at < _LOW_CLOCK * most:
            heat = f" at {state['temperature']} °C" if "temperature" in state else ""
            found.append(f"its GPU runs at {now_at} of {most} MHz{heat}")
    return "; ".join(found) or "its machine shows no reason"
