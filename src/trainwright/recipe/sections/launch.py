"""The section `launch` of a recipe: the job in which `trainwright submit` runs it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainwright.recipe.sections.fields import Count, Section, Text, seconds_of

_SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_NAME = re.compile(r"[\w.,@+-]+", re.ASCII)
_ARRAY = re.compile(r"\d+(?:-\d+(?::\d+)?)?(?:,\d+(?:-\d+(?::\d+)?)?)*(?:%\d+)?")


def job_seconds(time: str) -> int:
    """Return the seconds of a job's time limit: ``4:00:00``, ``1-12:00:00`` or ``90`` (minutes) as Slurm reads them, or
    ``4 h``. Raises ValueError if it is malformed.
    """
    match = _SLURM_TIME.fullmatch(time.strip())
    if match is None:
        return round(seconds_of(time))
    parts = [int(match[name]) for name in ("first", "second", "third") if match[name] is not None]
    days = int(match["days"] or 0)
    # minutes, minutes:seconds, hours:minutes:seconds; days-hours, days-hours:minutes, days-hours:minutes:seconds
    units = (3600, 60, 1) if match["days"] or len(parts) == 3 else (60, 1)
    seconds = days * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if seconds <= 0:
        raise ValueError(time)
    return seconds


def _time(value: object) -> object:
    try:
        if isinstance(value, str) and job_seconds(value):
            return value
    except ValueError:
        pass
    raise PydanticCustomError("time", 'a time such as 4 h, or in quotes "4:00:00" or "1-12:00:00"')


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise PydanticCustomError("name", "a name of letters, digits, '.', ',', '_', '@', '+' and '-'")
    return value


def _array(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _ARRAY.fullmatch(text):
        raise PydanticCustomError("array", "indices such as 0-9, 1,3,7 or 0-99%4 (at most four at once)")
    return text


Name = Annotated[Text, AfterValidator(_name)]


class JobSection(Section):
    """What a job asks its scheduler for."""

    nodes: Count | None = Field(None, description="Number of nodes. Default: 1.")
    gpus_per_node: Count | None = Field(
        None,
        description="Number of GPUs of each node. Default: those of the cluster's machine in clusters.yaml, or none.",
    )
    cpus_per_node: Count | None = Field(
        None, description="Number of CPUs of each node. Default: the share of a node's CPUs that its GPUs have."
    )
    time: Annotated[str, BeforeValidator(_time)] | None = Field(
        None, description="Time limit: 4 h, or as Slurm writes it, 4:00:00 or 1-12:00:00. Default: the partition's."
    )
    partition: Name | None = Field(None, description="Partition, or several with commas. Default: the scheduler's.")
    account: Name | None = Field(None, description="Account that is charged. Default: the user's.")
    array: Annotated[str, BeforeValidator(_array)] | None = Field(
        None,
        description="Indices of an array of jobs, such as 0-9 or 0-99%4. Each element has its own run, named by its "
        "index, and {element} in an override is replaced by it.",
    )
    jobs: Count | None = Field(
        None,
        description="Number of jobs that train the run, one after another, where none can be requeued; what is not "
        "needed is canceled. Default: 1.",
    )
    until_done: bool | None = Field(
        None,
        description="Requeue the job after its time limit too, until the run has finished; after a preemption or a "
        "fault of a machine it is requeued anyway.",
    )
    manifest: Literal["jobset", "trainjob", "pytorchjob"] | None = Field(
        None,
        description="With Kubernetes: a JobSet, a TrainJob of Kubeflow Trainer 2 with its runtime, or a "
        "PyTorchJob of the Kubeflow training operator 1. Default: jobset.",
    )
    grace: Annotated[str, BeforeValidator(_time)] | None = Field(
        None,
        description="With Kubernetes: time from the signal that ends a pod to its kill, in which a checkpoint is "
        "written. Default: 2 min.",
    )


class LaunchSection(JobSection):
    """The job in which `trainwright submit` runs the recipe; `trainwright train` ignores it."""

    to: Name | None = Field(
        None,
        description="slurm, kubernetes, skypilot, ray, or the name of a cluster in "
        "~/.config/trainwright/clusters.yaml.",
    )
