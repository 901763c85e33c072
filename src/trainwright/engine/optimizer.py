"""Optimizers by their name in a recipe, with weight decay on matrices only, and the schedule of the learning rate.

Muon updates matrices by their orthogonalized momentum, and all other parameters by AdamW: Jordan et al., "Muon: An
optimizer for hidden layers in neural networks" (2024, https://kellerjordan.github.io/posts/muon/), with Nesterov
momentum, and a scale that gives updates the size of AdamW's, so that one learning rate works for both (Liu et al.,
arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.engine.parameter_groups import parameter_groups
from trainwright.errors import RequestError
from trainwright.parallel.matrix_exchange import MatrixExchange
from trainwright.parallel.matrix_owners import ITERATIONS, is_matrix
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


def adamw(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> Optimizer:
    """Return torch's AdamW. Vectors (norms, biases) have no weight decay: shrinking them toward zero is not useful."""
    return AdamW(
        parameter_groups(named, section),
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


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


# Coefficients of the quintic Newton-Schulz iteration.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_LIKE_ADAMW = 0.2


class Muon(Optimizer):
    """Use Muon for the matrices of blocks, and AdamW for embeddings, the head and vectors.

    Attributes:
        exchange: divides the updates of matrices over the ranks; set by strategies of several.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> None:
        groups = parameter_groups(named, section, lambda name, parameter: is_matrix(name, parameter.dim()))
        super().__init__(groups, {"lr": section.learning_rate})
        self.exchange: MatrixExchange | None = None
        self._momentum = section.momentum
        self._adamw: AdamW | None = None
        if plain := [group for group in self.param_groups if not group["kind"]]:
            self._adamw = AdamW(plain, lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True)
            self._adamw.state = self.state  # one shared state to save; the groups are already shared

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        if self._adamw is not None and any(p.grad is not None for g in self._adamw.param_groups for p in g["params"]):
            self._adamw.step()
        for group in self.param_groups:
            if group["kind"]:
                for parameter, update in self._updates(group["params"]):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])

    def _updates(self, group: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        parameters = [parameter for parameter in group if parameter.grad is not None]
        for parameter in parameters:
            grad, state = parameter.grad, self.state[parameter]
            assert grad is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
            state["momentum_buffer"].lerp_(grad, 1 - self._momentum)
        if self.exchange is None:
            for parameter in parameters:
                yield parameter, _update(self._ahead(parameter))
            return
        dtype = _working_dtype(self.exchange.device)
        for parameter, update in self.exchange(parameters, self._ahead, _update, dtype):
            yield parameter, update.to(parameter.device)

    def _ahead(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the gradient moved on by the momentum (Nesterov)."""
        grad, momentum = parameter.grad, self.state[parameter]["momentum_buffer"]
        assert grad is not None
        return grad.lerp(momentum, self._momentum)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``matrix`` [m, n] and singular values near 1 (Newton-Schulz).

    In bf16 on a GPU, as its authors do; in fp32 on a CPU.
    """
    work = matrix.to(_working_dtype(matrix.device))
    tall = work.shape[0] > work.shape[1]
    work = work.t() if tall else work
    work = work / work.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = work @ work.t()
        work = _A * work + (_B * square + _C * square @ square) @ work
    return work.t() if tall else work


def _working_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _update(matrix: torch.Tensor) -> torch.Tensor:
    return orthogonalized(matrix) * (_LIKE_ADAMW * math.sqrt(max(matrix.shape)))
