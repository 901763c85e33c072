"""Cross-entropy of a linear head that never holds the logits of more than a chunk of targets.

The head of a language model is its largest matrix product and its logits the largest tensor of a step: 49,152
numbers a token for SmolLM2. Here the targets go through it in chunks, and as a loss that is a sum has its gradient
at hand when its value is, both are computed in one pass: three matrix products a target, none of them twice.
(The idea is that of Liger Kernel, arXiv 2410.10989, section 3.2; the softmax is always in fp32.)
"""

from __future__ import annotations

from typing import Any

import torch

# Bytes of one chunk's fp32 logits.
_CHUNK_BYTES = 64 * 2**20


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Sum over N targets of the cross-entropy of ``hidden`` [N, H] @ ``weight`` [V, H]^T (+ ``bias`` [V]).

    ``logit_scale`` multiplies the logits, then ``softcap`` bounds them as ``softcap * tanh(logits / softcap)``.

    Returns:
        The sum in nats, fp32 scalar. Divide by a weight outside.
    """
    total: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, softcap, logit_scale)
    return total


@torch.no_grad()
def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood in nats [N] and whether the target was the likeliest token [N], without gradients."""
    losses, correct = [], []
    for part in _chunks(len(targets), weight.shape[0]):
        logits = _logits(hidden[part], weight, bias, softcap, logit_scale)
        at_target = logits.gather(1, targets[part, None])[:, 0]
        losses.append(logits.logsumexp(1) - at_target)
        correct.append(logits.argmax(1) == targets[part])
    if not losses:
        return hidden.new_zeros(0, dtype=torch.float32), targets.new_zeros(0, dtype=torch.bool)
    return torch.cat(losses), torch.cat(correct)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        softcap: float | None,
        logit_scale: float,
    ) -> torch.Tensor:
        wants = ctx.needs_input_grad
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grads = _HeadGradients(weight if wants[1] else None, bias if wants[2] else None)
        for part in _chunks(len(targets), weight.shape[0]):
            logits = _logits(hidden[part], weight, bias, softcap, logit_scale)
            columns = targets[part, None]
            capped = None if softcap is None else logits.clone()
            # From here on `logits` becomes, in place, log-probabilities, probabilities, and the gradient.
            logits -= logits.logsumexp(1, keepdim=True)
            total -= logits.gather(1, columns).sum()
            if not any(wants[:3]):
                continue
            logits.exp_()
            logits.scatter_add_(1, columns, logits.new_full((), -1.0).expand_as(columns))
            if capped is not None and softcap is not None:
                logits *= 1 - (capped / softcap).square()
            if logit_scale != 1.0:
                logits *= logit_scale
            delta = logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[part])
            grads.add(delta, hidden[part])
        ctx.save_for_backward(grad_hidden, *grads.result())
        ctx.spent = False
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if ctx.spent:
            raise RuntimeError("the gradient of linear_cross_entropy was already taken")
        ctx.spent = True  # the saved gradients are scaled in place: they are as large as the head
        scaled = [None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None)


class _HeadGradients:
    """Gradients of the head summed over chunks; in fp32 as soon as there is more than one chunk."""

    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self._like = (weight, bias)
        self._sums: list[torch.Tensor | None] = [None, None]

    def add(self, delta: torch.Tensor, hidden: torch.Tensor) -> None:
        weight, bias = self._like
        if weight is not None:
            before = self._sums[0]
            if before is None:
                self._sums[0] = delta.t() @ hidden
            elif delta.dtype == torch.float32:
                before.addmm_(delta.t(), hidden)
            else:
                self._sums[0] = before.float().add_(delta.t() @ hidden)
        if bias is not None:
            before = self._sums[1]
            part = delta.sum(0, dtype=torch.float32)
            self._sums[1] = part if before is None else before.add_(part)

    def result(self) -> list[torch.Tensor | None]:
        return [
            None if like is None else torch.zeros_like(like) if total is None else total.to(like.dtype)
            for like, total in zip(self._like, self._sums, strict=True)
        ]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    logit_scale: float,
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if logit_scale != 1.0:
        logits = logits * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _chunks(count: int, vocabulary: int) -> list[slice]:
    """Slices of equal size, as few as keep a chunk's logits within bounds."""
    if not count:
        return []
    size = max(16, _CHUNK_BYTES // (4 * vocabulary))
    pieces = -(-count // size)
    size = -(-count // pieces)
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
