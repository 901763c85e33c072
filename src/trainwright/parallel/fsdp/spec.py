"""The spec of `fsdp`. Imports no torch."""

from __future__ import annotations

from trainwright.recipe.strategy_spec import Collective, StrategySpec

_EVERYTHING = frozenset({"parameters", "master weights", "optimizer state", "gradients"})

FSDP = StrategySpec(
    summary="parameters, gradients and optimizer state are sharded (torch's FSDP2)",
    implementation="trainwright.parallel.fsdp.fully_sharded:FullySharded",
    memory="trainwright.planning.memory.fsdp:FsdpMemory",
    shards=frozenset({"parameters", "gradients", "optimizer state"}),
    separate_masters=False,
    collectives=(Collective("all_gather", "parameters", "passes"), Collective("reduce_scatter", "gradients", "passes")),
    reads=("replicate_size", "reshard_after_forward", "wrap"),
    offloads={"offload_parameters": _EVERYTHING},
    layouts=({"reshard_after_forward": False}, {}, {"offload_parameters": True}),
    accelerate_type="FSDP",
)
