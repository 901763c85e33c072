"""The specs of `single` and `ddp`. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from trainwright.recipe.strategy_spec import Collective, StrategySpec

SINGLE = StrategySpec(
    summary="one process has the full model",
    implementation="trainwright.parallel.replicated.replicated:Replicated",
    memory="trainwright.planning.memory.replicated:ReplicatedMemory",
    most_processes=1,
)
DDP = replace(
    SINGLE,
    summary="every process has the full model and its share of each batch",
    most_processes=None,
    collectives=(Collective("all_reduce", "gradients", "buckets"),),
    bucket_bytes=25 * 2**20,  # as torch's DDP: large enough to use the links, small enough to overlap
)
