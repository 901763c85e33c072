"""Muon updates matrices by their orthogonalized momentum, and all other parameters by AdamW.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024,
https://kellerjordan.github.io/posts/muon/), with Nesterov momentum, and a scale that gives updates the size of AdamW's,
so that one learning rate works for both (Liu et al., arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainwright.engine.optimizer import build_parameter_groups
from trainwright.parallel.matrix_exchange import MatrixExchange
from trainwright.parallel.matrix_owners import ITERATIONS, group_into_stacks, is_matrix
from trainwright.recipe.schema import OptimizerSection

# Coefficients of the quintic Newton-Schulz iteration.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_LIKE_ADAMW = 0.2


class OfMatrices(Optimizer):
    """Update the matrices of blocks by ``_update_matrices``, and embeddings, the head and vectors by AdamW."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> None:
        groups = build_parameter_groups(named, section, lambda name, parameter: is_matrix(name, parameter.dim()))
        super().__init__(groups, {"lr": section.learning_rate})
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
                self._update_matrices(group)

    def _update_matrices(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Muon(OfMatrices):
    """Use Muon for the matrices of blocks, and AdamW for embeddings, the head and vectors.

    Attributes:
        exchange: divides the updates of matrices over the ranks; set by strategies of several.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> None:
        super().__init__(named, section)
        self.exchange: MatrixExchange | None = None
        self._momentum = section.momentum

    def _update_matrices(self, group: dict[str, Any]) -> None:
        for parameters, updates in self._updates(group["params"]):
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            del updates  # before the next ones are made

    def _updates(self, group: Iterable[nn.Parameter]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yield parameters and their updates, in the dtype of the parameters."""
        parameters = [parameter for parameter in group if parameter.grad is not None]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        if parameters:
            torch._foreach_lerp_(self._list_momenta(parameters), _list_gradients(parameters), 1 - self._momentum)
        if self.exchange is None:
            shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in parameters]
            for indices in group_into_stacks(shapes, on_gpu=bool(parameters) and parameters[0].device.type != "cpu"):
                stack = [parameters[index] for index in indices]
                yield [*stack], list(_update(self._stacked(stack)).to(stack[0].dtype).unbind())
            return
        dtype = _choose_working_dtype(self.exchange.device)
        for chunk, updates in self.exchange(parameters, self._ahead, _update, dtype):
            yield [*chunk], [u.to(p.device, p.dtype) for p, u in zip(chunk, updates, strict=True)]

    def _stacked(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        """Return what the updates of parameters of one shape [m, n] are computed from, as [count, m, n]."""
        first = parameters[0]
        stack = first.new_empty((len(parameters), *first.shape), dtype=_choose_working_dtype(first.device))
        torch._foreach_copy_(list(stack.unbind()), self._ahead(parameters))
        return stack

    def _list_momenta(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]

    def _ahead(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Return the gradients moved on by their momenta (Nesterov)."""
        return list(torch._foreach_lerp(_list_gradients(parameters), self._list_momenta(parameters), self._momentum))


def _list_gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the singular vectors of ``matrix`` [..., m, n] and singular values near 1 (Newton-Schulz).

    In bf16 on a GPU, as its authors do; in fp32 on a CPU.
    """
    work = matrix.to(_choose_working_dtype(matrix.device))
    tall = work.shape[-2] > work.shape[-1]
    work = work.mT if tall else work
    work = work / torch.linalg.vector_norm(work, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    work = work.unsqueeze(0) if matrix.dim() == 2 else work
    for _ in range(ITERATIONS):
        square = work @ work.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        work = torch.baddbmm(work, polynomial, work, beta=_A)
    work = work.squeeze(0) if matrix.dim() == 2 else work
    return work.mT if tall else work


def _choose_working_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _update(matrix: torch.Tensor) -> torch.Tensor:
    return orthogonalize(matrix) * (_LIKE_ADAMW * math.sqrt(max(matrix.shape[-2:])))
