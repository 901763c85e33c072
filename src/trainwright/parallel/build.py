"""From a strategy's name in a recipe to the strategy."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.parallel.replicated import Replicated
from trainwright.parallel.strategy import OptimizerFactory, Strategy
from trainwright.parallel.world import World


def build_strategy(
    name: str, world: World, module: nn.Module, make_optimizer: OptimizerFactory, dtype: torch.dtype
) -> Strategy:
    """Spread ``module`` (fp32, on CPU) over ``world``.

    Raises:
        ValueError: a name that is no strategy.
    """
    if name in ("single", "ddp"):
        return Replicated(name, world, module, make_optimizer, dtype)
    raise ValueError(f"parallel.strategy: {name} is not a strategy")
