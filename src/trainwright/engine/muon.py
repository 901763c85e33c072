"""Muon: updates matrices by their orthogonalized momentum; all other parameters use AdamW.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024,
https://kellerjordan.github.io/posts/muon/), with Nesterov momentum, and a scale that gives updates the size of AdamW's,
so that one learning rate works for both (Liu et al., arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.recipe.schema import OptimizerSection

# Coefficients and number of iterations of the quintic Newton-Schulz iteration.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_LIKE_ADAMW = 0.2
_EMBEDDINGS = ("wte", "wpe", "lm_head", "head", "positions", "score")


class Muon(Optimizer):
    """Use Muon for the matrices of blocks, and AdamW for embeddings, the head and vectors.

    Attributes:
        gather: returns the full tensor and the first row of this process's part, given a parameter and that part; set
            when parameters are sharded by rows.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> None:
        given = list(named)
        matrices = [parameter for name, parameter in given if is_matrix(name, parameter)]
        others = [parameter for name, parameter in given if not is_matrix(name, parameter)]
        groups = [
            {"params": matrices, "weight_decay": section.weight_decay, "muon": True},
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": section.weight_decay, "muon": False},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0, "muon": False},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": section.learning_rate})
        self.gather: Callable[[nn.Parameter, torch.Tensor], tuple[torch.Tensor, int]] | None = None
        self._momentum = section.momentum
        self._adamw: AdamW | None = None
        if plain := [group for group in self.param_groups if not group["muon"]]:
            self._adamw = AdamW(plain, lr=section.learning_rate, betas=section.betas, eps=section.eps, fused=True)
            self._adamw.state = self.state  # one shared state to save; the groups are already shared

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None, "gradients are there already"
        if self._adamw is not None and any(p.grad is not None for g in self._adamw.param_groups for p in g["params"]):
            self._adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                for parameter, update in self._updates(group["params"]):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])

    def _updates(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
            momentum: torch.Tensor = state["momentum_buffer"].lerp_(grad, 1 - self._momentum)
            ahead = grad.lerp(momentum, self._momentum)
            whole, row = (ahead, 0) if self.gather is None else self.gather(parameter, ahead)
            scale = _LIKE_ADAMW * math.sqrt(max(whole.shape))
            update = orthogonalized(whole)[row : row + len(parameter)]
            yield parameter, update.to(parameter.device) * scale


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a weight matrix of a block, and not an embedding or the head."""
    parts = name.split(".")
    return parameter.dim() == 2 and not any("embed" in part or part in _EMBEDDINGS for part in parts)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``matrix`` [m, n] and singular values near 1 (Newton-Schulz).

    In bf16 on a GPU, as its authors do; in fp32 on a CPU.
    """
    work = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = work.shape[0] > work.shape[1]
    work = work.t() if tall else work
    work = work / work.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        square = work @ work.t()
        work = _A * work + (_B * square + _C * square @ square) @ work
    return work.t() if tall else work
