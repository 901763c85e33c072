"""Adafactor (Shazeer and Stern, arXiv 1804.04235) with the rate of the schedule, as transformers' Adafactor with
``scale_parameter=False, relative_step=False``, which its Trainer uses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.engine.optimizer import build_parameter_groups
from trainwright.parallel.strategy import RowShards
from trainwright.recipe.schema import OptimizerSection

_EPS, _CLIP, _DECAY = 1e-30, 1.0, -0.8


class Adafactor(Optimizer):
    """Divide gradients by the root of their second moment, of matrices as the product of means of rows and columns.

    Where rows are divided over ranks, the sums over a column and over all elements are those of all ranks, exchanged
    twice a step for all parameters together.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> None:
        super().__init__(build_parameter_groups(named, section), {"lr": section.learning_rate})
        self._shards: RowShards | None = None

    def divide(self, shards: RowShards) -> None:
        """Set how the rows of parameters are divided."""
        self._shards = shards

    def state_shape(self, slot: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of a state of a parameter of this shape; None: every rank has all of it."""
        if slot == "rows":
            return shape[:-1]
        if slot == "columns":
            return None if len(shape) == 2 else (*shape[:-2], shape[-1])
        return shape

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not pairs:
            return
        parameters = [parameter for parameter, _ in pairs]
        means = self._advance(parameters)
        squares = torch.stack([self._update(p, mean).square().sum() for p, mean in zip(parameters, means, strict=True)])
        self._sum([(p, squares[index : index + 1]) for index, p in enumerate(parameters)])
        for (parameter, group), mean, square in zip(pairs, means, squares, strict=True):
            update = self._update(parameter, mean)
            root = (square / max(1, math.prod(self._shape(parameter)))).sqrt()
            update.div_((root / _CLIP).clamp_(min=1.0)).mul_(group["lr"])
            parameter.add_(parameter, alpha=-group["weight_decay"] * group["lr"])
            parameter.sub_(update)

    def _advance(self, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
        """Move the second moments on by the gradients; return the mean of the rows' means of every matrix."""
        sums: list[tuple[nn.Parameter, torch.Tensor]] = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                self._begin(parameter, state)
            state["step"] += 1
            keep = 1.0 - float(state["step"]) ** _DECAY
            square = self._require_gradient(parameter).square().add_(_EPS)
            if "square" in state:
                state["square"].mul_(keep).add_(square, alpha=1 - keep)
                continue
            state["rows"].mul_(keep).add_(square.mean(-1), alpha=1 - keep)
            columns = square.sum(-2) / self._shape(parameter)[-2]
            if parameter.dim() > 2:
                state["columns"].mul_(keep).add_(columns, alpha=1 - keep)
            else:
                sums.append((parameter, torch.cat([columns, state["rows"].sum(-1, keepdim=True)])))
        self._sum(sums)
        totals = dict(sums)
        means: list[torch.Tensor | None] = []
        for parameter in parameters:
            state, total = self.state[parameter], totals.get(parameter)
            if total is not None:
                keep = 1.0 - float(state["step"]) ** _DECAY
                state["columns"].mul_(keep).add_(total[:-1], alpha=1 - keep)
                means.append(total[-1:] / self._shape(parameter)[0])
            else:
                means.append(state["rows"].mean(-1, keepdim=True) if "rows" in state else None)
        return means

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        shape = parameter.shape
        state["step"] = torch.zeros(())
        if len(shape) < 2:
            state["square"] = torch.zeros_like(parameter)
            return
        state["rows"] = parameter.new_zeros(shape[:-1])
        state["columns"] = parameter.new_zeros((*shape[:-2], shape[-1]))

    def _update(self, parameter: nn.Parameter, mean: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient divided by the root of its second moment."""
        state, grad = self.state[parameter], self._require_gradient(parameter)
        if mean is None:
            return state["square"].rsqrt().mul_(grad)
        return (state["rows"] / mean).rsqrt_().unsqueeze(-1) * state["columns"].unsqueeze(-2).rsqrt() * grad

    def _require_gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def _shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return tuple(parameter.shape if self._shards is None else self._shards.shape(parameter))

    def _sum(self, parts: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Add in place what the other ranks have of the same parameters; scalars are not divided."""
        tensors = [tensor for parameter, tensor in parts if parameter.dim()]
        if self._shards is None or self._shards.ranks == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._shards.sum(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
