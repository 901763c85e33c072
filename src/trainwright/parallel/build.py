"""From a strategy's name in a recipe to the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainwright.parallel.replicated.replicated import Replicated
from trainwright.parallel.strategy import OptimizerFactory, Strategy
from trainwright.parallel.world import World
from trainwright.recipe.schema import ParallelSection

if TYPE_CHECKING:
    from trainwright.models.weights import Weights


def takes_parts(parallel: ParallelSection) -> bool:
    """Whether ranks need parts of the weights only, so that none has to have them all."""
    return parallel.strategy in ("fsdp", "zero3")


def build_strategy(
    parallel: ParallelSection,
    world: World,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    make_optimizer: OptimizerFactory,
    dtype: torch.dtype,
    weights: Weights | None = None,
) -> Strategy:
    """Spread ``module`` (fp32, on CPU; ``blocks`` are its repeated units) over ``world``.

    Args:
        weights: what fills its parameters where they are on the meta device, for a strategy that ``takes_parts``.

    Raises:
        RequestError: keys of the recipe's section that do not fit the model or the world.
        MachineError: the strategy needs a library that is not installed.
        ValueError: a name that is no strategy.
    """
    assert weights is not None or not any(p.is_meta for p in module.parameters()), "nothing would fill the weights"
    name = parallel.strategy
    if name in ("single", "ddp"):
        return Replicated(name, world, module, make_optimizer, dtype)
    if name == "fsdp":
        from trainwright.parallel.fsdp.fully_sharded import FullySharded

        return FullySharded(name, world, module, make_optimizer, dtype, parallel, blocks, weights)
    if name in ("zero1", "zero2", "zero3"):
        from trainwright.parallel.zero.zero import Zero

        return Zero(name, world, module, make_optimizer, dtype, parallel, weights)
    raise ValueError(f"parallel.strategy: {name} is not a strategy")
