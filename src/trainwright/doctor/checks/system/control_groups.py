"""Check the limits of control groups, which containers and schedulers set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.machine import cgroups
from trainwright.machine.cgroups import read
from trainwright.machine.measured.contention import usable_cores
from trainwright.utils.text import plural, size

_LEAST_MEMORY = 4 * 2**30  # torch, transformers and a small model in two processes
_PIDS = 256  # two processes with their threads
_ASK = "docker run {}, resources.limits of the pod, or {} of the Slurm job"


def check(context: CheckContext) -> CheckResult:
    """Read the limits of memory, cores and processes of this process's groups."""
    memory, free, cores = cgroups.memory_limit(), cgroups.memory_free(), cgroups.cpu_limit()
    pids = tuple(_pids())
    shown = [
        "memory: no limit" if memory is None else f"memory {size(memory)}, {size(free or 0)} free",
        f"{plural(usable_cores(), 'core')}, no quota" if cores is None else f"{cores:.3g} cores by quota",
        "processes: no limit" if not pids else f"processes {pids[0][0]} of {pids[0][1]}",
    ]
    findings = (*_of_memory(memory, free), *_of_cores(cores), *_of_pids(pids))
    return CheckResult(("; ".join(shown),), findings)


def _of_memory(limit: int | None, free: int | None) -> Iterator[Finding]:
    if limit is not None and free is not None and free < _LEAST_MEMORY:
        yield Finding(
            Severity.WARNING,
            f"the control group has {size(free)} of {size(limit)} left",
            "the kernel kills a process that exceeds it, without a message in the log of the run",
            f"give it more memory: {_ASK.format('--memory', '--mem')}; plans respect the limit",
        )


def _of_cores(limit: float | None) -> Iterator[Finding]:
    cores = usable_cores()
    if limit is not None and limit < cores:
        yield Finding(
            Severity.WARNING,
            f"throttled: the control group may use {limit:.3g} of {plural(cores, 'core')}",
            "once the quota of a period is used, all threads are paused for the rest of it",
            f"raise the quota to whole cores: {_ASK.format('--cpus', '--cpus-per-task')}; or run fewer threads: "
            f"OMP_NUM_THREADS={max(1, int(limit))}",
        )


def _of_pids(pid_limits: tuple[tuple[int, int], ...]) -> Iterator[Finding]:
    for used, limit in pid_limits:
        if limit - used < _PIDS:
            yield Finding(
                Severity.BROKEN,
                f"the control group has {used} of at most {limit} processes and threads; {_PIDS} more may be needed",
                "starting a thread fails with `Resource temporarily unavailable`",
                f"raise it: {_ASK.format('--pids-limit', 'TasksMax of the unit')}",
            )


def _pids(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Yield the number and the limit of processes of each group that has a limit."""
    for group, _ in cgroups.groups("pids", root):
        used, limit = read(group / "pids.current").strip(), read(group / "pids.max").strip()
        if used.isdigit() and limit.isdigit():
            yield int(used), int(limit)
