"""The variables of the environment that change what a job's file asks for: to sbatch, they come before its options, and
to the job's srun those of the job that has submitted it.

See "INPUT ENVIRONMENT VARIABLES" of sbatch(1) and srun(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_OPTION = re.compile(r"^#SBATCH\s+(?:--([\w-]+)|-(\w))", re.MULTILINE)
_LONG = {"A": "account", "C": "constraint", "G": "gpus", "J": "job-name", "M": "clusters", "p": "partition", "q": "qos"}
_LONG |= {"a": "array", "e": "error", "o": "output", "t": "time"}
# Of options whose variable has another name, or which have the same effect as others.
_MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
_VARIABLES = {
    "cpus-per-task": ("CPUS_PER_GPU",),
    "gpus-per-node": ("GPUS", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "output": ("ERROR",),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
# A job is an array only if its file says so, and is submitted without waiting for its end.
_NEVER = ("ARRAY_INX", "WAIT")
# Slurm's variables that no job sets.
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")


def overriding(script: str, variables: Iterable[str]) -> list[str]:
    """Return those of the variables that override what a job's file asks for."""
    written = {long or _LONG.get(short, "") for long, short in _OPTION.findall(script)}
    also = (name for option in written for name in _VARIABLES.get(option, ()))
    names = {*(option.upper().replace("-", "_") for option in written), *also, *_NEVER}
    return sorted({f"SBATCH_{name}" for name in names - {"REQUEUE"}} & set(variables))


def without_own_job(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those of the job that this process belongs to: sbatch gives them to the new job, and
    replaces only those that it sets in every job.
    """
    if "SLURM_JOB_ID" not in variables:
        return dict(variables)
    return {name: value for name, value in variables.items() if not name.startswith("SLURM_") or name in _OF_CLUSTER}
