"""Check limits: of the user (open files, processes, memory, CPU time), of control groups, and of ``/dev/shm``."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckResult, Finding, Severity
from trainwright.machine import cgroups
from trainwright.machine.cgroups import read_text
from trainwright.machine.measured.contention import count_usable_cores
from trainwright.run.limits import check_process_limits, count_needed_files
from trainwright.utils.text import format_bytes, format_plural

_PROCESSES = 2  # of the steps that other checks run
_THREADS_A_PROCESS = 64
_INFINIBAND = Path("/sys/class/infiniband")
_AMPLE_FILES = 65536
# Limits that break training: name, command that shows it, whether it is in bytes, effect.
_UNEXPECTED = (
    ("RLIMIT_AS", "ulimit -v", True, "mapping weights and starting threads fails with `Cannot allocate memory`"),
    ("RLIMIT_DATA", "ulimit -d", True, "allocating tensors fails with `can't allocate memory`"),
    ("RLIMIT_FSIZE", "ulimit -f", True, "writing a larger checkpoint ends the run with SIGXFSZ"),
    ("RLIMIT_CPU", "ulimit -t", False, "the kernel ends a process after this many seconds of computing"),
)


def check(context: CheckContext) -> CheckResult:
    """Compare the limits with the needs of training."""
    processes = max(_PROCESSES, len(context.machine.gpus))
    facts = [f"open files {_format_limit(resource.RLIMIT_NOFILE)}, processes {_format_limit(resource.RLIMIT_NPROC)}"]
    findings = [*_check_files(processes), *_check_threads(processes), *_check_other_limits()]
    findings += _check_locked_memory(facts)
    return CheckResult(tuple(facts), tuple(findings))


def _check_files(processes: int) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    demand = count_needed_files(processes, processes)
    if _is_below(hard, demand):
        yield Finding(
            Severity.BROKEN,
            f"the limit of open files is {hard} (ulimit -n), and a run of {processes} processes needs {demand}",
            "each process opens libraries, data files and a connection to every other process",
            f"`ulimit -n {_AMPLE_FILES}` in the shell that starts the run; nofile in /etc/security/limits.conf; "
            f"docker run --ulimit nofile={_AMPLE_FILES}; LimitNOFILE= of the service",
        )
    elif _is_below(soft, demand):
        what = f"the limit of open files is {soft} (ulimit -n), and a run of {processes} processes needs {demand}"
        why = f"Trainwright raises it up to the hard limit ({hard}); scripts of other launchers do not"
        fix = f"`ulimit -n {min(_AMPLE_FILES, hard) if hard > 0 else _AMPLE_FILES}` before starting them"
        yield Finding(Severity.NOTE, what, why, fix)


def _check_threads(processes: int) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:  # root is not limited
        return
    running = [process.info for process in psutil.process_iter(["uids", "num_threads"])]  # None: not to be read
    own = [info for info in running if info["uids"] is not None and info["uids"].real == os.getuid()]
    count = sum(info["num_threads"] or 0 for info in own)
    demand = processes * _THREADS_A_PROCESS
    if soft - count < demand:
        yield Finding(
            Severity.BROKEN,
            f"this user may have {soft} processes and threads (ulimit -u) and has {count}; {demand} more are needed",
            "starting a thread fails with `Resource temporarily unavailable`",
            f"`ulimit -u {count + 4 * demand}`, or nproc in /etc/security/limits.conf; end programs that are left over",
        )


def _check_other_limits() -> Iterator[Finding]:
    for name, command, is_bytes, then in _UNEXPECTED:
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            text = format_bytes(limit) if is_bytes else f"{limit} s"
            what = f"a limit is set: {text} ({command})"
            yield Finding(Severity.WARNING, what, then, f"`{command} unlimited` in the shell that starts the run")


def _check_locked_memory(facts: list[str]) -> Iterator[Finding]:
    """Yield a finding if locked memory is limited and the machine has InfiniBand."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return
    facts.append(f"locked memory {_format_limit(resource.RLIMIT_MEMLOCK)}")
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        yield Finding(
            Severity.BROKEN,
            f"locked memory is limited to {format_bytes(limit)} (ulimit -l), and this machine has InfiniBand",
            "InfiniBand registers locked buffers: NCCL fails with `ibv_reg_mr failed` or `Cannot allocate memory`",
            "memlock unlimited in /etc/security/limits.conf; docker run --ulimit memlock=-1; PropagateResourceLimits= "
            "of Slurm",
        )


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _format_limit(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return format_bytes(soft) if kind == resource.RLIMIT_MEMLOCK else f"{soft:,}"


_LEAST_MEMORY = 4 * 2**30  # torch, transformers and a small model in two processes
_PIDS = 256  # two processes with their threads
_ASK = "docker run {}, resources.limits of the pod, or {} of the Slurm job"


def check_control_groups(context: CheckContext) -> CheckResult:
    """Read the limits of memory, cores and processes of this process's groups."""
    memory, free, cores = cgroups.read_memory_limit(), cgroups.read_free_memory(), cgroups.read_cpu_limit()
    pids = tuple(_iterate_pid_limits())
    parts = [
        "memory: no limit" if memory is None else f"memory {format_bytes(memory)}, {format_bytes(free or 0)} free",
        f"{format_plural(count_usable_cores(), 'core')}, no quota" if cores is None else f"{cores:.3g} cores by quota",
        "processes: no limit" if not pids else f"processes {pids[0][0]} of {pids[0][1]}",
    ]
    findings = (*_check_memory_limit(memory, free), *_check_core_limit(cores), *_check_pid_limits(pids))
    return CheckResult(("; ".join(parts),), findings)


def _check_memory_limit(limit: int | None, free: int | None) -> Iterator[Finding]:
    if limit is not None and free is not None and free < _LEAST_MEMORY:
        what = f"the control group has {format_bytes(free)} of {format_bytes(limit)} left"
        why = "the kernel kills a process that exceeds it, without a message in the log of the run"
        fix = f"give it more memory: {_ASK.format('--memory', '--mem')}; plans respect the limit"
        yield Finding(Severity.WARNING, what, why, fix)


def _check_core_limit(limit: float | None) -> Iterator[Finding]:
    cores = count_usable_cores()
    if limit is not None and limit < cores:
        yield Finding(
            Severity.WARNING,
            f"throttled: the control group may use {limit:.3g} of {format_plural(cores, 'core')}",
            "once the quota of a period is used, all threads are paused for the rest of it",
            f"raise the quota to whole cores: {_ASK.format('--cpus', '--cpus-per-task')}; or run fewer threads: "
            f"OMP_NUM_THREADS={max(1, int(limit))}",
        )


def _check_pid_limits(pid_limits: tuple[tuple[int, int], ...]) -> Iterator[Finding]:
    for count, limit in pid_limits:
        if limit - count < _PIDS:
            what = f"the control group has {count} of at most {limit} processes and threads; {_PIDS} more may be needed"
            why = "starting a thread fails with `Resource temporarily unavailable`"
            fix = f"raise it: {_ASK.format('--pids-limit', 'TasksMax of the unit')}"
            yield Finding(Severity.BROKEN, what, why, fix)


def _iterate_pid_limits() -> Iterator[tuple[int, int]]:
    """Yield the number and the limit of processes of each group that has a limit."""
    for group, _ in cgroups.iterate_groups("pids"):
        count, limit = read_text(group / "pids.current").strip(), read_text(group / "pids.max").strip()
        if count.isdigit() and limit.isdigit():
            yield int(count), int(limit)


_SHARED = Path("/dev/shm")
# NCCL creates segments of about 10 MB for each pair of GPUs that cannot reach each other directly; PyTorch's data
# loaders keep several batches for each worker.
_AMPLE, _AMPLE_A_GPU = 64 * 2**20, 256 * 2**20
_FIX = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def check_shared_memory(context: CheckContext) -> CheckResult:
    """Compare its size with what NCCL, data loaders and Trainwright need."""
    if not sys.platform.startswith("linux"):
        raise CannotCheck("this system does not use /dev/shm")
    gpus = len(context.machine.gpus)
    try:
        status = os.statvfs(_SHARED)
    except OSError as error:
        what = f"there is no {_SHARED}: {error.strerror}"
        why = "processes of one machine exchange locks and data there"
        fix = f"mount -t tmpfs tmpfs {_SHARED}"
        finding = Finding(Severity.BROKEN, what, why, fix)
        return CheckResult((), (finding,))
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    fact = f"{format_bytes(total)}, {format_bytes(free)} free"
    return CheckResult((fact,), tuple(_check_shared_memory_size(total, free, gpus)))


def _check_shared_memory_size(total: int, free: int, gpus: int) -> Iterator[Finding]:
    recommendation = max(_AMPLE, gpus * _AMPLE_A_GPU)
    if not os.access(_SHARED, os.W_OK | os.X_OK):
        what = f"this user cannot write to {_SHARED}"
        why = "processes of one machine exchange locks and data there"
        fix = f"chmod 1777 {_SHARED} (as root)"
        yield Finding(Severity.BROKEN, what, why, fix)
    elif (problem := check_process_limits(None, free, 2, 2)) is not None:
        what, _, fix = problem.partition("; ")
        yield Finding(Severity.BROKEN, what, "nothing can be started", fix)
    elif total < recommendation:
        what = f"{_SHARED} has only {format_bytes(total)}; {format_bytes(recommendation)} are recommended here"
        why = "NCCL and data loaders with workers fail with `No space left on device`, or a bus error, when it is full"
        yield Finding(Severity.BROKEN if gpus > 1 else Severity.WARNING, what, why, _FIX)
    elif free < recommendation:
        what = f"{format_bytes(free)} of {format_bytes(total)} are free in {_SHARED}"
        why = "NCCL and data loaders with workers fail with `No space left on device`, or a bus error, when it is full"
        fix = f"remove files of programs that have ended: `ls -lt {_SHARED}`"
        yield Finding(Severity.WARNING, what, why, fix)
