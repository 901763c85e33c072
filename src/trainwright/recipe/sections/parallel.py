"""The section `parallel` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trainwright.recipe.registered import Registered
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.sections.fields import Auto, Count, Section, Text, Time, is_count
from trainwright.recipe.strategy_spec import StrategySpec, all_specs, spec_of

_MAX_PROCESSES = 1_000_000
# Every number of a range is checked.
_MAX_OF_RANGE = 4096


def _with_summaries(schema: dict[str, Any]) -> None:
    summaries = [f"{name}: {spec.summary}." for name, spec in all_specs().items()]
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


def _processes(value: object) -> object:
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

    strategy: Annotated[str, Registered(STRATEGIES, ("auto",))] = Field("auto", json_schema_extra=_with_summaries)
    num_processes: Annotated[
        Annotated[Count, Field(le=_MAX_PROCESSES)] | ProcessRange | Auto, BeforeValidator(_processes)
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
        return None if self.strategy == "auto" else spec_of(self.strategy)

    @property
    def processes(self) -> int | Auto:
        """Return the number of processes, or the largest of a range."""
        return self.num_processes.max if isinstance(self.num_processes, ProcessRange) else self.num_processes

    @property
    def is_one_process(self) -> bool:
        """Return whether the strategy runs a single process."""
        return self.spec is not None and self.spec.is_one_process
