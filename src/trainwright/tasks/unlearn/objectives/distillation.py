"""Losses of every position, from its logits [n, V] and optionally those of a teacher, which get no gradient."""

from __future__ import annotations

import torch


def undial(logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute UNDIAL (arXiv 2402.10052): cross-entropy from softmax(z_ref - beta 1_target) to the model.

    The teacher is the reference with the logit of the forget token lowered by ``beta``.
    """
    lowered = teacher.scatter_add(1, targets[:, None], teacher.new_full((len(teacher), 1), -beta))
    return _cross_entropy(logits, lowered.softmax(1))


def ce_u(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute CE-U (arXiv 2503.01224): cross-entropy from the model's own softmax without the target to the model.

    In the target distribution, which gets no gradient, the logit of the forget token is minus infinity.
    """
    aim = logits.detach().scatter(1, targets[:, None], float("-inf")).softmax(1)
    return _cross_entropy(logits, aim)


def flatten(logits: torch.Tensor) -> torch.Tensor:
    """Compute the logit-margin flattening of PDU (arXiv 2506.05314): (max_v z_v - mean_v z_v)^2."""
    return (logits.amax(1) - logits.mean(1)).square()


def divergence(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute KL(reference || model) = sum_v pi_ref(v) (log pi_ref(v) - log pi(v)); on retain rows (arXiv
    2401.06121).
    """
    expected = teacher.log_softmax(1)
    return (expected.exp() * (expected - logits.log_softmax(1))).sum(1)


def _cross_entropy(logits: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
    """Return -sum_v aim(v) log pi(v) [n]."""
    return -(aim * logits.log_softmax(1)).sum(1)
