"""What a run does as it begins in a job of Slurm: it warns of what would end it early, and ends an orphaned step."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from pathlib import Path

from trainwright.run.group.environment import SUPERVISING_LAUNCHERS
from trainwright.run.shutdown.stop import is_shell
from trainwright.utils.text import say

_SUPERVISOR = "slurmstepd"
_SCANCEL_SECONDS = 60  # for Slurm's answer


def begin(launcher: str) -> str | None:
    """Begin a run whose processes ``launcher`` starts; return a warning or None."""
    if launcher != "trainwright":
        return signal_warning(launcher)
    end_orphaned_step()
    return job_script_warning()


def job_script_warning() -> str | None:
    """Return a warning about a command to which Slurm leaves no time for a last checkpoint, or None."""
    if os.environ.get("SLURM_TASK_PID") != str(os.getppid()) or not is_shell(os.getppid()):
        return None
    return (
        "this command runs in a job script: on scancel, preemption and at the time limit, Slurm ends the script's "
        "shell and this run before it can write a last checkpoint; put exec or srun before the command"
    )


def signal_warning(launcher: str) -> str | None:
    """Return a warning for a job whose launcher would die of SIGUSR1 or SIGUSR2; otherwise None.

    Slurm sends the signal of `--signal=USR1@N` to every process of a step. torchrun neither handles nor passes on
    these two by default (`--signals-to-handle`, torch/distributed/run.py).
    """
    if launcher not in SUPERVISING_LAUNCHERS or "SLURM_JOB_ID" not in os.environ:
        return None
    handled = _handled(os.getppid())
    fatal = [number.name for number in (signal.SIGUSR1, signal.SIGUSR2) if not handled >> (number - 1) & 1]
    if not fatal:
        return None
    return (
        f"{launcher} (process {os.getppid()}) dies of {' and '.join(fatal)}: with #SBATCH --signal=USR1@SECONDS, Slurm "
        "may end this run before its last checkpoint is written; start it with trainwright under, or export "
        "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 in the job script"
    )


def _handled(pid: int) -> int:
    """Return the signals that a process handles or ignores as bits (proc(5)); all if that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return -1
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    return masks[0] | masks[1] if len(masks) == 2 else -1


def end_orphaned_step() -> None:
    """When this process ends, have Slurm end its job step if what supervises it has died by then."""
    job, step, parent = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID"), os.getppid()
    if job and step and _program_name(parent) == _SUPERVISOR:
        atexit.register(_end_step, f"{job}.{step}", os.getpid(), parent)


def _end_step(step: str, process: int, parent: int) -> None:
    if os.getpid() != process or os.getppid() == parent:  # a child of it, or all is well
        return
    say(f"{_SUPERVISOR} of step {step} has died on this node, so the step is ended by scancel", file=sys.stderr)
    try:
        subprocess.run(["scancel", step], capture_output=True, timeout=_SCANCEL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"scancel {step} failed: {error}", file=sys.stderr)


def _program_name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
