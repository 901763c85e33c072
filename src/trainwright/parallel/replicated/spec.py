"""The specs of `single` and `ddp`. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from trainwright.recipe.strategy_spec import Collective, StrategySpec


def step_elements(on_gpu: bool) -> int:
    """Return how many gradients a bf16 optimizer step converts to fp32 at a time, but for a parameter with more.

    It bounds the memory of a step. A GPU takes 1 GiB: most steps are one pass, as every piece launches kernels anew.
    """
    return 2**28 if on_gpu else 2**24


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
