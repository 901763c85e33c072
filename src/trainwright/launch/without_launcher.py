"""What a worker of torchrun or `accelerate launch` does when its launcher dies: it stops after a checkpoint.

Slurm sends the signal of `--signal=USR1@N` to every process of a step. torchrun neither handles nor passes on SIGUSR1
and SIGUSR2 by default (`--signals-to-handle`, torch/distributed/run.py), and dies of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from trainwright.errors import EXIT_FAULT
from trainwright.launch.ending.exit_code import record_exit_code
from trainwright.launch.process import die_with_parent

_LAUNCHERS = ("torchrun", "accelerate launch")
_CHECK_SECONDS = 1.0
# How long a worker may take for its step and the checkpoint; one that hangs must not keep its GPU.
_GRACE_SECONDS = 600.0


def stop_without_launcher(launcher: str) -> None:
    """Let the death of this process's launcher request a stop, instead of killing this process at once.

    SIGTERM must request a stop already, as after ``follow_signals``.
    """
    parent = os.getppid()
    if launcher not in _LAUNCHERS:
        return
    die_with_parent(parent, signal.SIGTERM)
    threading.Thread(target=_end_after, args=(parent,), daemon=True, name="launcher").start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    time.sleep(_GRACE_SECONDS)
    os._exit(record_exit_code(EXIT_FAULT))


def signal_warning(launcher: str) -> str | None:
    """Return a warning for a job of Slurm whose launcher would die of SIGUSR1 or SIGUSR2; otherwise None."""
    if launcher not in _LAUNCHERS or "SLURM_JOB_ID" not in os.environ:
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
