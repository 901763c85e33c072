"""The variables of the environment that change what a job's file asks for: to sbatch, they come before its options.

See "INPUT ENVIRONMENT VARIABLES" of sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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


def overriding(script: str, variables: Iterable[str]) -> list[str]:
    """Return those of the variables that override what a job's file asks for."""
    written = {long or _LONG.get(short, "") for long, short in _OPTION.findall(script)}
    also = (name for option in written for name in _VARIABLES.get(option, ()))
    names = {*(option.upper().replace("-", "_") for option in written), *also, *_NEVER}
    return sorted({f"SBATCH_{name}" for name in names - {"REQUEUE"}} & set(variables))
