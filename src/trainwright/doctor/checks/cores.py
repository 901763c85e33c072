"""Check each core by computing on it: its relative speed, quotas, thermal throttling, and clock limits."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckResult, Finding, Severity
from trainwright.machine.cgroups import read_text
from trainwright.machine.measured.contention import CpuContention
from trainwright.utils.text import format_plural

_SECONDS = 0.1  # of computing on a core, each time
_ROUNDS = 3  # the best one counts
_MOST_CORES = 32  # evenly chosen ones, on larger machines
_BLOCK = bytes(2**16)
_SLOW = 0.6  # of the median speed of all cores
_THROTTLED, _TAKEN = 0.05, 0.2  # shares of periods and of time
_CAPPED = 0.95  # of the largest clock
_SYSTEM = Path("/sys/devices/system/cpu")


def check(context: CheckContext) -> CheckResult:
    """Compute for a moment on every core, alone."""
    if not hasattr(os, "sched_setaffinity"):
        raise CannotCheck("this system does not bind processes to cores")
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[:: math.ceil(len(cores) / _MOST_CORES)]
    heat, before = _read_heat_counts(cores), CpuContention.now()
    start, cpu_start = time.perf_counter(), time.thread_time()
    rates = _measure_rates(cores)
    ran = (time.thread_time() - cpu_start) / (time.perf_counter() - start)
    shares = CpuContention.now().since(before)
    if "waited" in shares:  # the uncounted rest: the process was stopped
        shares["stopped"] = max(0.0, 1 - ran / max(1 - shares["waited"], 1e-6))
    hotter = {core: count - heat.get(core, 0) for core, count in _read_heat_counts(cores).items()}
    findings = (*_check_slow(rates), *_check_shares(shares), *_check_heat(hotter), *_check_capped(cores))
    return CheckResult(tuple(_describe_rates(rates, shares)), findings)


def _measure_rates(cores: list[int]) -> dict[int, float]:
    """Return hashed bytes per second of computing time on each core; time of other programs does not count."""
    affinity = os.sched_getaffinity(0)
    rates: dict[int, float] = {}
    try:
        for _ in range(_ROUNDS):
            for core in cores:
                os.sched_setaffinity(0, {core})
                rates[core] = max(rates.get(core, 0.0), _measure_rate())
    finally:
        os.sched_setaffinity(0, affinity)
    return rates


def _measure_rate() -> float:
    count, end = 0, time.perf_counter() + _SECONDS
    start = time.thread_time()
    while time.perf_counter() < end:
        hashlib.sha256(_BLOCK).digest()
        count += len(_BLOCK)
    return count / max(time.thread_time() - start, 1e-6)


def _check_slow(rates: Mapping[int, float]) -> Iterator[Finding]:
    middle = statistics.median(rates.values())
    slow = {core: rate / middle for core, rate in rates.items() if rate < _SLOW * middle}
    if slow:
        text = ", ".join(f"core {core} ({share:.0%})" for core, share in slow.items())
        yield Finding(
            Severity.WARNING,
            f"slower than the other cores: {text} of their speed",
            "all processes wait for the slowest one in every step",
            "if these are not efficiency cores, check for heat or a power limit (dmesg, the vendor's tool); or "
            "exclude them: taskset --cpu-list CORES trainwright train ...",
        )


def _check_shares(shares: Mapping[str, float]) -> Iterator[Finding]:
    if shares.get("throttled", 0.0) > _THROTTLED:
        yield Finding(
            Severity.WARNING,
            f"throttled: the quota of the control group was used up in {shares['throttled']:.0%} of its periods, with "
            "one busy core",
            "processes are paused for the rest of each of these periods",
            "raise the quota (docker run --cpus, resources.limits.cpu of the pod, CPUQuota= of the unit)",
        )
    if shares.get("stolen", 0.0) > _TAKEN:
        what = f"the hypervisor gave {shares['stolen']:.0%} of the cores' time to other machines"
        why = "steps take longer, by a varying amount"
        fix = "use an instance with dedicated cores, or stop others on this host"
        yield Finding(Severity.WARNING, what, why, fix)
    explained = shares.get("throttled", 0.0) > _THROTTLED or shares.get("stolen", 0.0) > _TAKEN
    if shares.get("stopped", 0.0) > _TAKEN and not explained:
        yield Finding(
            Severity.WARNING,
            f"throttled: this process was stopped for {shares['stopped']:.0%} of the measured time, though no "
            "other program had its core",
            "steps take longer, and all ranks wait for a stopped process",
            "find what stops processes repeatedly: cpulimit, a debugger, a scheduler that suspends jobs (SIGSTOP), a "
            "host that pauses this virtual machine",
        )
    if shares.get("waited", 0.0) > _TAKEN:
        what = f"other programs used the cores for {shares['waited']:.0%} of the measured time"
        why = "training shares the cores with them"
        fix = "find them with top, and stop those that are left over"
        yield Finding(Severity.NOTE, what, why, fix)


def _check_heat(hotter: Mapping[int, int]) -> Iterator[Finding]:
    hot = [core for core, count in hotter.items() if count > 0]
    if hot:
        what = f"throttled by heat while this ran: core {', '.join(map(str, hot))}"
        why = "the processor lowers its clock to cool down"
        fix = "check the fans, dust and the power limit of the machine; `sensors` shows temperatures"
        yield Finding(Severity.WARNING, what, why, fix)


def _check_capped(cores: list[int], root: Path = _SYSTEM) -> Iterator[Finding]:
    caps = {}
    for core in cores:
        clock = root / f"cpu{core}" / "cpufreq"
        highest, limit = read_text(clock / "cpuinfo_max_freq").strip(), read_text(clock / "scaling_max_freq").strip()
        if highest.isdigit() and limit.isdigit() and int(limit) < _CAPPED * int(highest):
            caps[core] = int(limit) / int(highest)
    if caps:
        lowest = min(caps, key=lambda core: caps[core])
        yield Finding(
            Severity.WARNING,
            f"the clock of {format_plural(len(caps), 'core')} is limited, of core {lowest} to {caps[lowest]:.0%}",
            "the processor never reaches its full speed",
            "cpupower frequency-set --max with the maximum clock of `cpupower frequency-info` (as root), or the power "
            "profile of the machine",
        )


def _read_heat_counts(cores: list[int], root: Path = _SYSTEM) -> dict[int, int]:
    """Return how often each core was throttled by heat since the machine started, where the kernel counts it."""
    counts = {}
    for core in cores:
        count = read_text(root / f"cpu{core}" / "thermal_throttle" / "core_throttle_count").strip()
        if count.isdigit():
            counts[core] = int(count)
    return counts


def _describe_rates(rates: Mapping[int, float], shares: Mapping[str, float]) -> Iterator[str]:
    slowest = min(rates, key=lambda core: rates[core])
    middle = statistics.median(rates.values())
    yield (
        f"{format_plural(len(rates), 'core')} measured, {middle / 1e9:.2f} GB/s of SHA-256 each; the slowest: core "
        f"{slowest} with {rates[slowest] / middle:.0%}"
    )
    descriptions = {
        "throttled": "by a quota",
        "stolen": "to the hypervisor",
        "waited": "to other programs",
        "stopped": "stopped",
    }
    parts = [f"{share:.0%} {descriptions[name]}" for name, share in shares.items() if share >= 0.01]
    if parts:
        yield f"time lost: {', '.join(parts)}"
