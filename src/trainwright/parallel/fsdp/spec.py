"""The spec of `fsdp`. Imports no torch."""

from __future__ import annotations

from trainwright.recipe.strategy_spec import Collective, Limit, StrategySpec

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
    limits=(
        Limit(
            "optimizer.name",
            (),
            "fsdp shards the state by rows, and {value} needs whole matrices; use parallel.strategy ddp or single, or "
            "optimizer muon or adamw",
            "not soap: fsdp shards states by rows, and its preconditioners are of whole matrices",
            refused=("soap",),
        ),
    ),
    accelerate_type="FSDP",
)
