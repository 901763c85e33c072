"""Check ``/dev/shm``, through which processes of one machine exchange data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckResult, Finding, Severity
from trainwright.run.limits import shortage
from trainwright.utils.text import size

_SHARED = Path("/dev/shm")
# NCCL creates segments of about 10 MB for each pair of GPUs that cannot reach each other directly; PyTorch's data
# loaders keep several batches for each worker.
_AMPLE, _AMPLE_A_GPU = 64 * 2**20, 256 * 2**20
_FIX = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def check(context: CheckContext) -> CheckResult:
    """Compare its size with what NCCL, data loaders and Trainwright need."""
    if not sys.platform.startswith("linux"):
        raise CannotCheck("this system does not use /dev/shm")
    gpus = len(context.machine.gpus)
    try:
        status = os.statvfs(_SHARED)
    except OSError as error:
        finding = Finding(
            Severity.BROKEN,
            f"there is no {_SHARED}: {error.strerror}",
            "processes of one machine exchange locks and data there",
            f"mount -t tmpfs tmpfs {_SHARED}",
        )
        return CheckResult((), (finding,))
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    fact = f"{size(total)}, {size(free)} free"
    return CheckResult((fact,), tuple(_findings(total, free, gpus)))


def _findings(total: int, free: int, gpus: int) -> Iterator[Finding]:
    recommended = max(_AMPLE, gpus * _AMPLE_A_GPU)
    if not os.access(_SHARED, os.W_OK | os.X_OK):
        yield Finding(
            Severity.BROKEN,
            f"this user cannot write to {_SHARED}",
            "processes of one machine exchange locks and data there",
            f"chmod 1777 {_SHARED} (as root)",
        )
    elif (problem := shortage(None, free, 2, 2)) is not None:
        what, _, fix = problem.partition("; ")
        yield Finding(Severity.BROKEN, what, "nothing can be started", fix)
    elif total < recommended:
        yield Finding(
            Severity.BROKEN if gpus > 1 else Severity.WARNING,
            f"{_SHARED} has only {size(total)}; {size(recommended)} are recommended here",
            "NCCL and data loaders with workers fail with `No space left on device`, or a bus error, when it is full",
            _FIX,
        )
    elif free < recommended:
        yield Finding(
            Severity.WARNING,
            f"{size(free)} of {size(total)} are free in {_SHARED}",
            "NCCL and data loaders with workers fail with `No space left on device`, or a bus error, when it is full",
            f"remove files of programs that have ended: `ls -lt {_SHARED}`",
        )
