"""Optimizers by their name in a recipe, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.engine.muon import Muon
from trainwright.parallel.strategy import OptimizerFactory
from trainwright.recipe.schema import OptimizerSection


def optimizer_factory(section: OptimizerSection) -> OptimizerFactory:
    """Return the function with which a strategy makes the recipe's optimizer over its parameters.

    Vectors (norms, biases) have no weight decay: shrinking them toward zero is not useful. The engine sets the
    learning rate of each step.
    """

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        if section.name == "muon":
            return Muon(named, section)
        parameters = [parameter for _, parameter in named]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.eps,
            fused=True,
        )

    return make
