"""Check the limits of the user: open files, processes, memory, file sizes, CPU time."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from trainwright.doctor.checks.check import CheckContext, CheckResult, Finding, Severity
from trainwright.run.limits import needed_files
from trainwright.utils.text import size

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
    facts = [f"open files {_shown(resource.RLIMIT_NOFILE)}, processes {_shown(resource.RLIMIT_NPROC)}"]
    findings = [*_files(processes), *_threads(processes), *_others(), *_locked(facts)]
    return CheckResult(tuple(facts), tuple(findings))


def _files(processes: int) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_files(processes, processes)
    if _is_below(hard, needed):
        yield Finding(
            Severity.BROKEN,
            f"the limit of open files is {hard} (ulimit -n), and a run of {processes} processes needs {needed}",
            "each process opens libraries, data files and a connection to every other process",
            f"`ulimit -n {_AMPLE_FILES}` in the shell that starts the run; nofile in /etc/security/limits.conf; "
            f"docker run --ulimit nofile={_AMPLE_FILES}; LimitNOFILE= of the service",
        )
    elif _is_below(soft, needed):
        yield Finding(
            Severity.NOTE,
            f"the limit of open files is {soft} (ulimit -n), and a run of {processes} processes needs {needed}",
            f"Trainwright raises it up to the hard limit ({hard}); scripts of other launchers do not",
            f"`ulimit -n {min(_AMPLE_FILES, hard) if hard > 0 else _AMPLE_FILES}` before starting them",
        )


def _threads(processes: int) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:  # root is not limited
        return
    used = sum(_thread_count(process) for process in psutil.process_iter() if _is_mine(process))
    needed = processes * _THREADS_A_PROCESS
    if soft - used < needed:
        yield Finding(
            Severity.BROKEN,
            f"this user may have {soft} processes and threads (ulimit -u) and has {used}; {needed} more are needed",
            "starting a thread fails with `Resource temporarily unavailable`",
            f"`ulimit -u {used + 4 * needed}`, or nproc in /etc/security/limits.conf; end programs that are left over",
        )


def _others() -> Iterator[Finding]:
    for name, command, is_bytes, then in _UNEXPECTED:
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            shown = size(limit) if is_bytes else f"{limit} s"
            what = f"a limit is set: {shown} ({command})"
            yield Finding(Severity.WARNING, what, then, f"`{command} unlimited` in the shell that starts the run")


def _locked(facts: list[str]) -> Iterator[Finding]:
    """Yield a finding if locked memory is limited and the machine has InfiniBand."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return
    facts.append(f"locked memory {_shown(resource.RLIMIT_MEMLOCK)}")
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        yield Finding(
            Severity.BROKEN,
            f"locked memory is limited to {size(limit)} (ulimit -l), and this machine has InfiniBand",
            "InfiniBand registers locked buffers: NCCL fails with `ibv_reg_mr failed` or `Cannot allocate memory`",
            "memlock unlimited in /etc/security/limits.conf; docker run --ulimit memlock=-1; PropagateResourceLimits= "
            "of Slurm",
        )


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _shown(kind: int) -> str:
    soft = resource.getrlimit(kind)[0]
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return size(soft) if kind == resource.RLIMIT_MEMLOCK else f"{soft:,}"


def _is_mine(process: psutil.Process) -> bool:
    try:
        return process.uids().real == os.getuid()
    except psutil.Error:
        return False


def _thread_count(process: psutil.Process) -> int:
    try:
        return process.num_threads()
    except psutil.Error:
        return 0
