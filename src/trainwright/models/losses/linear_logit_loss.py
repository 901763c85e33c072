"""Losses of all logits of a position, through a linear head that only holds the logits of a chunk of targets.

As in linear_cross_entropy.py, but for any loss: autograd computes its gradient with respect to the logits, a few rows
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainwright.models.losses.linear_cross_entropy import (
    Head,
    HeadGradients,
    chunks,
    finished,
    padded_logits,
    row_blocks,
    set_hidden_gradient,
)

# Maps logits [n, V], targets [n] and a teacher's logits [n, V] or None to the loss of each position [n].
LogitLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def linear_logit_loss(
    head: Head, targets: torch.Tensor, loss: LogitLoss, teacher: Head | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute a loss at N positions; return its sum, the loss of each, and the negative log-likelihood of each target.

    Args:
        targets: [N].
        teacher: gets no gradient.

    Returns:
        Scalar, [N], [N] in nats; only the sum is differentiable, with respect to the hidden states and the head.
    """
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _LinearLogitLoss.apply(
        head.hidden, head.weight, head.bias, targets, loss, head, teacher
    )
    return found


class _LinearLogitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        loss: LogitLoss,
        head: Head,
        teacher: Head | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wants = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grads = HeadGradients(weight if wants[1] else None, bias if wants[2] else None)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        each, losses = hidden.new_empty(len(targets), dtype=dtype), hidden.new_empty(len(targets), dtype=dtype)
        for part in chunks(len(targets), hidden, weight):
            logits, count = padded_logits(hidden[part], weight, bias), part.stop - part.start
            for rows in row_blocks(logits[:count]):
                place = slice(part.start + (rows.start or 0), part.start + (rows.stop or count))
                taught = None if teacher is None else _teacher_logits(teacher, place)
                _block(logits[rows], targets[place], loss, head, taught, each[place], losses[place])
            if grad_hidden is not None:
                set_hidden_gradient(grad_hidden[part], logits, weight)
            grads.add(logits, hidden[part])
        ctx.save_for_backward(grad_hidden, *grads.result())
        ctx.mark_non_differentiable(each, losses)
        return each.sum(), each, losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


def _block(
    raw: torch.Tensor,
    targets: torch.Tensor,
    loss: LogitLoss,
    head: Head,
    taught: torch.Tensor | None,
    each: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """Compute the losses and negative log-likelihoods of some rows; overwrite ``raw`` with the gradient."""
    with torch.enable_grad():
        work = raw.detach().requires_grad_()
        logits = finished(work, head.softcap, head.logit_scale)
        value = loss(logits, targets, taught)
        (slope,) = torch.autograd.grad(value.sum(), work)
    each.copy_(value.detach())
    done = logits.detach()
    losses.copy_(done.logsumexp(1) - done.gather(1, targets[:, None])[:, 0])
    raw.copy_(slope)


def _teacher_logits(teacher: Head, rows: slice) -> torch.Tensor:
    hidden = teacher.hidden[rows]
    raw = padded_logits(hidden, teacher.weight, teacher.bias)[: len(hidden)]
    return finished(raw, teacher.softcap, teacher.logit_scale)
