"""RMU: representation misdirection for unlearning (arXiv 2403.03218)."""

from __future__ import annotations

import torch


def steered(activations: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Of every forget position, the mean over H of (h - c u)^2, with c u the fixed ``direction`` [H]; [n]."""
    return (activations - direction).square().mean(1)


def held(activations: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    """Of every retain position, the mean over H of (h - h_ref)^2; [n].

    Args:
        frozen: the reference's activations [n, H].
    """
    return (activations - frozen).square().mean(1)


def direction(width: int, coefficient: float, seed: int) -> torch.Tensor:
    """c u: a vector of ``coefficient`` length [H], fp32, its entries drawn evenly from 0 to 1 and by ``seed`` alone."""
    drawn = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm() * coefficient
