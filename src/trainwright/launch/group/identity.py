"""The identity of the job of a process, to reject members of another job that connect to the same port."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence

# Names of one job by a scheduler or launcher, the same in all of its processes.
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "TORCHELASTIC_RUN_ID")

Job = dict[str, str]

# Descriptions of the fields in which two jobs differ.
WORDS = {"user": "another user's", "job": "another job's", "size": "of another size", "arguments": "of another recipe"}


def job_of(
    size: int,
    arguments: Sequence[str] = (),
    start: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Job:
    """Return what all members of a start have in common.

    Args:
        size: the number of members.
        arguments: of the command line, if they must be the same for all.
        start: the launcher's own name for this start.
    """
    known = os.environ if variables is None else variables
    ids = [known[name] for name in _JOB_IDS if known.get(name)]
    return {
        "user": str(os.getuid()),
        "job": _digest([*ids, start or ""]),
        "size": str(size),
        "arguments": _digest(list(arguments)),
    }


def differences(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the keys in which two jobs differ."""
    return [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]


def _digest(values: list[str]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:20]
