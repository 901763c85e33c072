"""The sections `parallel` and `launch`: the processes of a run, and the job in which `trainwright submit` runs it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.sections.fields import Auto, Count, Registered, Section, Text, Time, is_count, parse_seconds
from trainwright.recipe.strategy_spec import StrategySpec, load_strategies, look_up_strategy

_MAX_PROCESSES = 1_000_000
# Every number of a range is checked.
_MAX_OF_RANGE = 4096


def _add_summaries(schema: dict[str, Any]) -> None:
    summaries = [f"{name}: {spec.summary}." for name, spec in load_strategies().items()]
    schema["description"] = " ".join(["How the model is distributed over processes.", *summaries])


class ProcessRange(Section):
    """As many processes as there are devices, between two numbers."""

    min: Count = Field(description="The run waits if there are fewer.")
    max: Annotated[Count, Field(le=_MAX_OF_RANGE)] = Field(description="What the plan is made for.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise PydanticCustomError("range", "a range whose min is not above its max")
        return self

    def __str__(self) -> str:
        """Return the range for messages."""
        return f"{self.min} to {self.max}"


def _parse_processes(value: object) -> object:
    if value == "auto" or isinstance(value, ProcessRange) or (is_count(value, least=1) and value <= _MAX_PROCESSES):
        return value
    try:
        return ProcessRange.model_validate(value)
    except ValidationError:
        raise PydanticCustomError(
            "processes",
            f"a whole number from 1 to {_MAX_PROCESSES:,}, auto, or a range such as {{min: 1, max: 8}} of at most "
            f"{_MAX_OF_RANGE:,}",
        ) from None


class ParallelSection(Section):
    """Distribution of the run over processes; affects only its speed."""

    strategy: Annotated[str, Registered(STRATEGIES, ("auto",))] = Field("auto", json_schema_extra=_add_summaries)
    num_processes: Annotated[
        Annotated[Count, Field(le=_MAX_PROCESSES)] | ProcessRange | Auto, BeforeValidator(_parse_processes)
    ] = Field(
        "auto",
        description="Number of worker processes. auto: one per GPU; on CPUs, the fastest number. {min: 1, max: 8}: as "
        "many as there are GPUs, and as the file slots in the run's directory allows; if that changes, the run goes on "
        "with another number. On several nodes, a total, divided equally over those that are there.",
    )
    device: Literal["auto", "cpu", "cuda", "xpu"] = Field(
        "auto",
        description="Device to train on, as torch names it. cuda: GPUs of NVIDIA or AMD, xpu: of Intel; an error if "
        "none is usable. cpu: the CPU, even if there are GPUs. auto: GPUs if there are any (an error if they are not "
        "usable), otherwise the CPU.",
    )
    replicate_size: Count = Field(
        1,
        description="fsdp: number of replicas of the sharded model (hybrid sharding); each is sharded over "
        "num_processes / replicate_size processes.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="fsdp: free a block's gathered weights after its forward pass and gather them again for the "
        "backward pass.",
    )
    offload_parameters: bool = Field(
        False, description="fsdp, zero3: offload parameters, and with fsdp also optimizer state, to the host's memory."
    )
    offload_optimizer: bool = Field(
        False, description="zero1, zero2, zero3: keep optimizer state in the host's memory and run the optimizer there."
    )
    timeout: Time = Field(
        "30 min",
        description="How long a collective may take before it fails. Not for waiting while one process loads, verifies "
        "or writes a model.",
    )
    wrap: list[Text] | Auto = Field(
        "auto", description="fsdp: class names of the modules to shard as units. auto: the model's blocks."
    )
    deepspeed_config: Text | None = Field(
        None, description="zero1, zero2, zero3: a DeepSpeed JSON file; its auto values come from this recipe."
    )

    @property
    def spec(self) -> StrategySpec | None:
        """Return the spec of the strategy; None if it is auto."""
        return None if self.strategy == "auto" else look_up_strategy(self.strategy)

    @property
    def processes(self) -> int | Auto:
        """Return the number of processes, or the largest of a range."""
        return self.num_processes.max if isinstance(self.num_processes, ProcessRange) else self.num_processes

    @property
    def is_one_process(self) -> bool:
        """Return whether the strategy runs a single process."""
        return self.spec is not None and self.spec.is_one_process


_SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_NAME = re.compile(r"[\w.,@+-]+", re.ASCII)
_ARRAY = re.compile(r"\d+(?:-\d+(?::\d+)?)?(?:,\d+(?:-\d+(?::\d+)?)?)*(?:%\d+)?")


def parse_job_seconds(time: str) -> int:
    """Return the seconds of a job's time limit: ``4:00:00``, ``1-12:00:00`` or ``90`` (minutes) as Slurm reads them, or
    ``4 h``. Raises ValueError if it is malformed.
    """
    match = _SLURM_TIME.fullmatch(time.strip())
    if match is None:
        return round(parse_seconds(time))
    parts = [int(match[name]) for name in ("first", "second", "third") if match[name] is not None]
    days = int(match["days"] or 0)
    # minutes, minutes:seconds, hours:minutes:seconds; days-hours, days-hours:minutes, days-hours:minutes:seconds
    units = (3600, 60, 1) if match["days"] or len(parts) == 3 else (60, 1)
    seconds = days * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if seconds <= 0:
        raise ValueError(time)
    return seconds


def _check_time(value: object) -> object:
    try:
        if isinstance(value, str) and parse_job_seconds(value):
            return value
    except ValueError:
        pass
    raise PydanticCustomError("time", 'a time such as 4 h, or in quotes "4:00:00" or "1-12:00:00"')


def _check_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise PydanticCustomError("name", "a name of letters, digits, '.', ',', '_', '@', '+' and '-'")
    return value


def _check_array(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _ARRAY.fullmatch(text):
        raise PydanticCustomError("array", "indices such as 0-9, 1,3,7 or 0-99%4 (at most four at once)")
    return text


Name = Annotated[Text, AfterValidator(_check_name)]


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
    time: Annotated[str, BeforeValidator(_check_time)] | None = Field(
        None, description="Time limit: 4 h, or as Slurm writes it, 4:00:00 or 1-12:00:00. Default: the partition's."
    )
    partition: Name | None = Field(None, description="Partition, or several with commas. Default: the scheduler's.")
    account: Name | None = Field(None, description="Account that is charged. Default: the user's.")
    array: Annotated[str, BeforeValidator(_check_array)] | None = Field(
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
    grace: Annotated[str, BeforeValidator(_check_time)] | None = Field(
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
