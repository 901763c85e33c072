"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners, for matrices of blocks (Vyas et al., arXiv 2409.11321).

As in its authors' code the first step only begins the preconditioners, and later ones refresh the bases after their
update. Two things differ, as rounding, such as that of a sum in another order, would choose the basis of the many
eigenvalues near 0 (of a gradient of few tokens), and losses would differ with the number of processes. The first basis
is of the gradient's singular vectors, the same eigenvectors, completed by a QR decomposition where singular values are
near 0; and a power iteration is of the preconditioner plus a small multiple of the identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainwright.engine.optimizers.muon import OfMatrices
from trainwright.recipe.optimizer_spec import LONGEST_SIDE, REFRESHED
from trainwright.recipe.schema import OptimizerSection

_CERTAIN = 1e-3  # of the largest singular value; rounding decides on the vectors of much smaller ones
_SHIFT = 1e-5  # of the sum of eigenvalues, which fp32 rounds by some 1e-7

State = dict[str, torch.Tensor]


class Soap(OfMatrices):
    """Use SOAP for the matrices of blocks, and AdamW for embeddings, the head and vectors."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> None:
        super().__init__(named, section)
        self._betas, self._eps = section.betas, section.eps

    def _update_matrices(self, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if state:
                self._update(weight, weight.grad, state, group)
            else:
                _begin(weight.grad, state)
            for side, square in (("left", weight.grad), ("right", weight.grad.mT)):
                if side in state:
                    state[side].lerp_(square @ square.mT, 1 - self._betas[1])
                    if state["step"] and not state["step"] % REFRESHED:
                        _refresh(state[side], state[f"{side}_basis"])

    def _update(self, weight: nn.Parameter, grad: torch.Tensor, state: State, group: dict[str, Any]) -> None:
        (first, second), mean, square = self._betas, state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        step = int(state["step"])
        mean.lerp_(grad, 1 - first)
        rotated_grad = _rotate_matrix(grad, state)
        square.mul_(second).addcmul_(rotated_grad, rotated_grad, value=1 - second)
        root = square.div(1 - second**step).sqrt_().add_(self._eps)
        update = _rotate_matrix(_rotate_matrix(mean, state).div_(root), state, back=True)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] / (1 - first**step))


def _begin(grad: torch.Tensor, state: State) -> None:
    """Make the state of a matrix, and the first bases of its sides."""
    state["step"] = torch.zeros(())  # of updates
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
    sides = {"left": grad.shape[0], "right": grad.shape[1]}
    rotated_sides = [side for side, length in sides.items() if length <= LONGEST_SIDE]
    if not rotated_sides:
        return
    left, values, right = torch.linalg.svd(grad, full_matrices=False)
    vectors, certain = {"left": left, "right": right.mT}, int((values > _CERTAIN * values[0]).sum())
    for side in rotated_sides:
        state[side] = grad.new_zeros((sides[side], sides[side]))
        state[f"{side}_basis"] = torch.linalg.qr(vectors[side][:, :certain], mode="complete").Q


def _refresh(preconditioner: torch.Tensor, basis: torch.Tensor) -> None:
    """Move an orthogonal basis [m, m] toward eigenvectors by one power iteration, in place."""
    product = (preconditioner @ basis).add_(basis * (_SHIFT * preconditioner.trace()))
    basis.copy_(torch.linalg.qr(product).Q)


def _rotate_matrix(matrix: torch.Tensor, state: State, *, back: bool = False) -> torch.Tensor:
    """Return a matrix [m, n] in the bases of its sides, or back in that of the weights, as a new tensor."""
    left, right = state.get("left_basis"), state.get("right_basis")
    if left is not None:
        matrix = (left if back else left.mT) @ matrix
    if right is not None:
        matrix = matrix @ (right.mT if back else right)
    return matrix.clone() if left is None and right is None else matrix
