"""The optimizer that a recipe names, an average of the weights beside it, and the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.errors import RequestError
from trainwright.parallel.strategy import OptimizerFactory
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import OPTIMIZERS, SCHEDULES
from trainwright.recipe.schema import OptimizerSection


def optimizer_factory(section: OptimizerSection) -> OptimizerFactory:
    """Return the function with which a strategy makes the recipe's optimizer over its parameters.

    `Strategy.step` sets the learning rate of each step. Raises RequestError if an optimizer of one's own cannot be
    imported; the function, if a key of the recipe has no effect on its parameters.
    """
    entry_point, described = OPTIMIZERS.get(section.name).implementation, OPTIMIZERS.describe(section.name)
    make = load(entry_point, f"{described}: its implementation {entry_point}")

    def create(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer: Optimizer = make(named, section)
        key = next((key for key in _OF_GROUPS if key in section.changed()), None)
        if key is not None and any("rate" not in group for group in optimizer.param_groups):
            raise RequestError(
                f"optimizer.{key}: {described} does not use trainwright.engine.parameter_groups, so it "
                "would have no effect; remove it or choose another optimizer"
            )
        return optimizer if section.ema_decay is None else with_average(optimizer, section.ema_decay)

    return create


_OF_GROUPS = ("groups", "layer_decay", "loraplus_ratio")


def with_average(optimizer: Optimizer, decay: float) -> Optimizer:
    """Return the optimizer with an ``average`` in the state of every parameter, which begins at its first value."""
    first: dict[nn.Parameter, torch.Tensor] = {}  # optimizers begin their state where there is none

    def updated() -> Iterator[nn.Parameter]:
        return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    def before(*_: Any) -> None:
        first.update({p: p.detach().clone() for p in updated() if "average" not in optimizer.state.get(p, {})})

    @torch.no_grad()
    def after(*_: Any) -> None:
        for parameter in updated():
            state = optimizer.state[parameter]
            if "average" not in state:
                state["average"] = first.pop(parameter)
            state["average"].lerp_(parameter, 1 - decay)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


class Schedule:
    """Learning rates of a run of n = ``max_steps`` optimizer steps, as a function of the step alone: no state to save.

    Step k of 0 to n - 1 uses ``learning_rate`` * (k + 1) / (w + 1) in a warm-up of w steps, so that no step has the
    rate 0 and step w has the peak. After it the rate is ``learning_rate`` * (r + (1 - r) * f(p)) with r =
    ``final_learning_rate_ratio`` and the progress p = (k - w) / (n - w), which is 0 at step w and would be 1 after the
    last step: f(p) = 1 (`constant`), 1 - p (`linear`) or (1 + cos(pi p)) / 2 (`cosine`), as in transformers and torch.
    `warmup_stable_decay` (arXiv 2404.06395) falls linearly over the last d = ``decay_steps``: p = (k - n + d) / d.
    `polynomial` is (1 - p)^power, `cosine_restarts` the cosine of the fractional part of p * ``cycles``, and
    `inverse_sqrt` sqrt((w + 1) / (k + 1)).
    """

    def __init__(self, section: OptimizerSection, max_steps: int) -> None:
        self._peak = section.learning_rate
        self._schedule = SCHEDULES.get(section.schedule)
        self._floor = section.final_learning_rate_ratio
        self._last = max_steps
        self._warmup = steps_of(section.warmup_steps, max_steps)
        self._decay = max_steps - self._warmup
        numbers = {"power": section.power, "cycles": section.cycles, "warmup": self._warmup, "total": max_steps}
        self._read = {name: numbers[name] for name in self._schedule.reads}
        if self._schedule.in_decay_steps:
            self._decay = min(self._decay, steps_of(section.decay_steps, max_steps))

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
        if step <= self._warmup:
            return self._peak * step / (self._warmup + 1)
        progress = 1.0 - (self._last - (step - 1)) / self._decay
        if not self._schedule.falls or progress <= 0:
            return self._peak
        return self._peak * (self._floor + (1.0 - self._floor) * self._schedule.factor(progress, **self._read))


def steps_of(value: int | float, max_steps: int) -> int:
    """Return a number of steps given as a count (int) or as a fraction of the run (float below 1)."""
    return round(value * max_steps) if isinstance(value, float) and value < 1 else int(value)
