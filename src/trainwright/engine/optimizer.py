"""Optimizers by their name in a recipe, with weight decay on matrices only, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.engine.muon import Muon
from trainwright.parallel.strategy import OptimizerFactory
from trainwright.recipe.schema import OptimizerSection


def optimizer_factory(section: OptimizerSection) -> OptimizerFactory:
    """Return the function with which a strategy makes the recipe's optimizer over its parameters.

    Vectors (norms, biases) have no weight decay: shrinking them toward zero is not useful. `Strategy.step`
    sets the learning rate of each step.
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


class Schedule:
    """Learning rates of a run of n = ``max_steps`` optimizer steps, as a function of the step alone: no state to save.

    Step k of 0 to n - 1 uses ``learning_rate`` * (k + 1) / (w + 1) in a warm-up of w steps, so that no step has the
    rate 0 and step w has the peak. After it the rate is ``learning_rate`` * (r + (1 - r) * f(p)) with r =
    ``final_learning_rate_ratio`` and the progress p = (k - w) / (n - w), which is 0 at step w and would be 1 after the
    last step: f(p) = 1 (`constant`), 1 - p (`linear`) or (1 + cos(pi p)) / 2 (`cosine`), as in transformers and torch.
    `warmup_stable_decay` (arXiv 2404.06395) falls linearly over the last d = ``decay_steps``: p = (k - n + d) / d.
    """

    def __init__(self, section: OptimizerSection, max_steps: int) -> None:
        self._peak = section.learning_rate
        self._kind = section.schedule
        self._floor = section.final_learning_rate_ratio
        self._last = max_steps
        self._warmup = steps_of(section.warmup_steps, max_steps)
        self._decay = max_steps - self._warmup
        if self._kind == "warmup_stable_decay":
            self._decay = min(self._decay, steps_of(section.decay_steps, max_steps))

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
        if step <= self._warmup:
            return self._peak * step / (self._warmup + 1)
        progress = 1.0 - (self._last - (step - 1)) / self._decay
        if self._kind == "constant" or progress <= 0:
            return self._peak
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if self._kind == "cosine" else 1.0 - progress
        return self._peak * (self._floor + (1.0 - self._floor) * remaining)


def steps_of(value: int | float, max_steps: int) -> int:
    """Return a number of steps given as a count (int) or as a fraction of the run (float below 1)."""
    return round(value * max_steps) if isinstance(value, float) and value < 1 else int(value)
