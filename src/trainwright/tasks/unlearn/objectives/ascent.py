"""Losses of every forget token, from its negative log-likelihood in nats [N]; all are element-wise."""

from __future__ import annotations

import torch


def grad_ascent(losses: torch.Tensor) -> torch.Tensor:
    """Gradient ascent (arXiv 2210.01504): log pi(y_i | x, y_<i); with a retain loss GradDiff (arXiv 2203.12817)."""
    return -losses


def wga(losses: torch.Tensor, beta: float) -> torch.Tensor:
    """Weighted gradient ascent (arXiv 2502.19301): w log pi(y_i | x, y_<i), with w = pi(y_i | x, y_<i)^beta.

    The weight is a number: no gradient goes through it. What is all but forgotten is left alone.
    """
    return -(-beta * losses.detach()).exp() * losses


def satimp(losses: torch.Tensor, beta: float, importance: float) -> torch.Tensor:
    """SatImp (arXiv 2505.11953): as ``wga`` with w = p^beta (1 - p)^importance, p = pi(y_i | x, y_<i).

    The first factor is the saturation of a token, the second its importance.
    """
    probability = (-losses.detach()).exp()
    return -(probability**beta) * (1 - probability) ** importance * losses


def descent(losses: torch.Tensor) -> torch.Tensor:
    """-log pi(y_i | x, y_<i), the loss of fine-tuning: of refusals, and of what is subtracted in the end."""
    return losses
