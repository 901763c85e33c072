"""RMU: representation misdirection for unlearning (arXiv 2403.03218)."""

from __future__ import annotations

import torch


def steered(activations: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of (h - c u)^2 at every forget position [n], with c u the fixed ``direction`` [H]."""
    return (activations - direction).square().mean(1)


def held(activations: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    """Return the mean over H of (h - h_ref)^2 at every retain position [n].

    Args:
        frozen: the reference's activations [n, H].
    """
    return (activations - frozen).square().mean(1)


def direction(width: int, coefficient: float, seed: int) -> torch.Tensor:
    """Return c u: a vector [H], fp32, of length ``coefficient``, with uniform entries in [0, 1) before scaling.

    It depends only on ``width``, ``coefficient`` and ``seed``.
    """
    drawn = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm() * coefficient
