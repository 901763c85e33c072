"""The section `parallel` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainwright.recipe.registered import Registered
from trainwright.recipe.sections.fields import Auto, Count, Section, Text, Time
from trainwright.recipe.strategy_spec import StrategySpec, all_specs, spec_of
from trainwright.registries import STRATEGIES


def _with_summaries(schema: dict[str, Any]) -> None:
    summaries = [f"{name}: {spec.summary}." for name, spec in all_specs().items()]
    schema["description"] = " ".join(["How the model is distributed over processes.", *summaries])


class ParallelSection(Section):
    """Distribution of the run over processes; affects only its speed."""

    strategy: Annotated[str, Registered(STRATEGIES, ("auto",))] = Field("auto", json_schema_extra=_with_summaries)
    num_processes: Annotated[Count, Field(le=1_000_000)] | Auto = Field(
        "auto", description="Number of worker processes. auto: one per GPU; on CPUs, the fastest number."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device to train on. cuda: GPUs; an error if none is usable. cpu: the CPU, even if there are "
        "GPUs. auto: GPUs if there are any (an error if they are not usable), otherwise the CPU.",
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
    def is_one_process(self) -> bool:
        """Return whether the strategy runs a single process."""
        return self.spec is not None and self.spec.is_one_process
