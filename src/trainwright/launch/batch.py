"""A launcher in a batch system's job script: its shell is ended first, and the launcher may get no signal."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

# Set in every job of Slurm, PBS (and Torque), LSF, Grid Engine, Flux and Cobalt.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID", "COBALT_JOBID")
_SHELLS = {"bash", "sh", "dash", "zsh", "ksh", "mksh", "csh", "tcsh", "fish", "busybox"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def stop_with_shell() -> None:
    """Have the kernel send SIGTERM when the job script's shell dies (prctl(2)): the run stops after a checkpoint."""
    parent = os.getppid()
    if not sys.platform.startswith("linux") or not any(name in os.environ for name in _JOBS) or not _is_shell(parent):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died between the two
        os.kill(os.getpid(), signal.SIGTERM)


def warning() -> str | None:
    """Return a warning about a command to which Slurm leaves no time for a last checkpoint, or None."""
    if os.environ.get("SLURM_TASK_PID") != str(os.getppid()) or not _is_shell(os.getppid()):
        return None
    return (
        "this command runs in a job script: on scancel, preemption and at the time limit, Slurm ends the script's "
        "shell and this run before it can write a last checkpoint; put exec or srun before the command"
    )


def _is_shell(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").resolve().name in _SHELLS
    except OSError:
        return False
