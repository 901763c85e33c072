"""The job of a scheduler that this process belongs to, and whether something starts it again."""

from __future__ import annotations

import os

# Set in every job of Slurm, PBS (and Torque), LSF, Grid Engine, Flux and Cobalt.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID", "COBALT_JOBID")
# Set by what starts a run again after a fault of a machine, and is no scheduler that sets one of these.
STARTS_AGAIN = "TRAINWRIGHT_STARTS_AGAIN"


def scheduler_job() -> str | None:
    """Return the number of the scheduler's job of this process, with Slurm's index in an array; None outside of one.

    Without its index, the element of an array that starts last has the number of the array, which Slurm's commands take
    for all of its elements.
    """
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and element:
        return f"{array}_{element}"
    return next((os.environ[name] for name in _JOBS if os.environ.get(name)), None)


def is_started_again() -> bool:
    """Return whether what has started this process may start it again when a machine has failed (exit code 5)."""
    return scheduler_job() is not None or bool(os.environ.get(STARTS_AGAIN))
