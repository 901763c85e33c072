"""A task of srun whose supervisor, slurmstepd, has died: srun would wait for its end until the job's time limit."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from pathlib import Path

from trainwright.text import say

_SUPERVISOR = "slurmstepd"
_SECONDS = 60  # for Slurm's answer


def end_orphaned_step() -> None:
    """When this process ends, have Slurm end its job step if what supervises it has died by then."""
    job, step, parent = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID"), os.getppid()
    if job and step and _program(parent) == _SUPERVISOR:
        atexit.register(_end, f"{job}.{step}", os.getpid(), parent)


def _end(step: str, process: int, parent: int) -> None:
    if os.getpid() != process or os.getppid() == parent:  # a child of it, or all is well
        return
    say(f"{_SUPERVISOR} of step {step} has died on this node, so the step is ended by scancel", file=sys.stderr)
    try:
        subprocess.run(["scancel", step], capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"scancel {step} failed: {error}", file=sys.stderr)


def _program(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
