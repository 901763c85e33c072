"""Losses of every forget token, from its negative log-likelihood in nats [N]; all functions are element-wise."""

from __future__ import annotations

import torch


def grad_ascent(losses: torch.Tensor) -> torch.Tensor:
    """Return log pi(y_i | x, y_<i): gradient ascent (arXiv 2210.01504); GradDiff with a retain loss (arXiv
    2203.12817).
    """
    return -losses


def wga(losses: torch.Tensor, beta: float) -> torch.Tensor:
    """Compute weighted gradient ascent (arXiv 2502.19301): w log pi(y_i | x, y_<i), with w = pi(y_i | x, y_<i)^beta.

    The weight has no gradient. Tokens that are almost forgotten have almost no weight.
    """
    return -(-beta * losses.detach()).exp() * losses


def satimp(losses: torch.Tensor, beta: float, importance: float) -> torch.Tensor:
    """Compute SatImp (arXiv 2505.11953): as ``wga`` with w = p^beta (1 - p)^importance, p = pi(y_i | x, y_<i).

    The first factor is the saturation of a token, the second its importance.
    """
    probability = (-losses.detach()).exp()
    return -(probability**beta) * (1 - probability) ** importance * losses


def descent(losses: torch.Tensor) -> torch.Tensor:
    """Return -log pi(y_i | x, y_<i), the fine-tuning loss: for refusals, and for what is subtracted at the end."""
    return losses
