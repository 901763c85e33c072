"""The optimizer that a recipe names, an average of the weights beside it, and the schedule of the learning rate.

The groups of an optimizer's parameters: weight decay on matrices only, and rates by pattern, by layer and of LoRA.

A group's ``rate`` is the part of the schedule's learning rate that it has; `parallel.strategy.set_learning_rate` sets
it under every strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.errors import RequestError
from trainwright.parallel.strategy import OptimizerFactory
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import OPTIMIZERS, SCHEDULES
from trainwright.recipe.schema import OptimizerSection


def build_optimizer_factory(section: OptimizerSection) -> OptimizerFactory:
    """Return the function with which a strategy makes the recipe's optimizer over its parameters.

    `Strategy.step` sets the learning rate of each step. Raises RequestError if an optimizer of one's own cannot be
    imported; the function, if a key of the recipe has no effect on its parameters.
    """
    entry_point, description = OPTIMIZERS.get(section.name).implementation, OPTIMIZERS.describe(section.name)
    make = load(entry_point, f"{description}: its implementation {entry_point}")

    def create(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer: Optimizer = make(named, section)
        key = next((key for key in _OF_GROUPS if key in section.changed()), None)
        if key is not None and any("rate" not in group for group in optimizer.param_groups):
            raise RequestError(
                f"optimizer.{key}: {description} does not use trainwright.engine.optimizer.build_parameter_groups, so "
                "it would have no effect; remove it or choose another optimizer"
            )
        return optimizer if section.ema_decay is None else add_average(optimizer, section.ema_decay)

    return create


_OF_GROUPS = ("groups", "layer_decay", "loraplus_ratio")


def add_average(optimizer: Optimizer, decay: float) -> Optimizer:
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
        self._warmup = count_steps(section.warmup_steps, max_steps)
        self._decay = max_steps - self._warmup
        numbers = {"power": section.power, "cycles": section.cycles, "warmup": self._warmup, "total": max_steps}
        self._read = {name: numbers[name] for name in self._schedule.reads}
        if self._schedule.in_decay_steps:
            self._decay = min(self._decay, count_steps(section.decay_steps, max_steps))

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
        if step <= self._warmup:
            return self._peak * step / (self._warmup + 1)
        progress = 1.0 - (self._last - (step - 1)) / self._decay
        if not self._schedule.falls or progress <= 0:
            return self._peak
        return self._peak * (self._floor + (1.0 - self._floor) * self._schedule.factor(progress, **self._read))


def count_steps(value: int | float, max_steps: int) -> int:
    """Return a number of steps given as a count (int) or as a fraction of the run (float below 1)."""
    return round(value * max_steps) if isinstance(value, float) and value < 1 else int(value)


# Blocks are numbered in the names of their parameters, and so are experts, after them.
_BLOCK = re.compile(r"\.(\d+)\.")
_MODULE = "model."  # the module around the model (models/causal_lm.py)


class _GroupRates(NamedTuple):
    """What differs between groups."""

    weight_decay: float
    rate: float
    kind: bool


def build_parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    section: OptimizerSection,
    kind: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False,
) -> list[dict[str, Any]]:
    """Return the parameters in groups, each with ``weight_decay``, ``rate`` and ``kind``; those of a kind are first.

    Args:
        kind: parameters that differ in it are in different groups.

    Raises:
        RequestError: a pattern matches no parameter that is trained.
    """
    parameters = list(named)
    names = [name.removeprefix(_MODULE) for name, _ in parameters]
    _check(section, names)
    depth = 1 + max((block for block in map(_parse_block_number, names) if block is not None), default=-1)
    groups: dict[_GroupRates, list[nn.Parameter]] = {}
    for (full, parameter), name in zip(parameters, names, strict=True):
        decay = section.weight_decay if parameter.dim() >= 2 else 0.0
        rate = _compute_layer_rate(section, name, depth)
        if section.loraplus_ratio is not None and ".lora_B." in name:
            rate *= section.loraplus_ratio
        for group in section.groups:
            if re.fullmatch(group.pattern, name):
                decay = decay if group.weight_decay is None else group.weight_decay
                rate = rate if group.learning_rate is None else group.learning_rate / section.learning_rate
        groups.setdefault(_GroupRates(decay, rate, kind(full, parameter)), []).append(parameter)
    ordered_groups = sorted(groups.items(), key=lambda item: not item[0].kind)
    return [{"params": members, **setting._asdict()} for setting, members in ordered_groups]


parameter_groups = build_parameter_groups  # the earlier name, which optimizers of other packages import


def _compute_layer_rate(section: OptimizerSection, name: str, depth: int) -> float:
    """Return the layer-wise part of the rate: 1 after the blocks, and ``layer_decay`` less with every block before."""
    if section.layer_decay is None or not depth:
        return 1.0
    block = _parse_block_number(name)
    if block is None:
        block = -1 if "embed" in name or name.rpartition(".")[0].rpartition(".")[2] in ("wte", "wpe") else depth
    return float(section.layer_decay ** (depth - block))


def _parse_block_number(name: str) -> int | None:
    match = _BLOCK.search(name)
    return None if match is None else int(match[1])


def _check(section: OptimizerSection, names: list[str]) -> None:
    for index, group in enumerate(section.groups):
        if not any(re.fullmatch(group.pattern, name) for name in names):
            raise RequestError(
                f"optimizer.groups.{index}.pattern: {group.pattern} matches none of the {len(names)} names of trained "
                f"parameters, such as {names[len(names) // 2]}"
            )
    if section.loraplus_ratio is not None and not any(".lora_B." in name for name in names):
        raise RequestError("optimizer.loraplus_ratio: has no effect without LoRA; remove it, or set model.adapter")
