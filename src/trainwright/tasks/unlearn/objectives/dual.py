"""Dual ascent of PDU (arXiv 2506.05314): forget as much as the limit of the retain loss permits."""

from __future__ import annotations


def ascended(weight: float, retain_loss: float, limit: float, step_size: float) -> float:
    """Update the multiplier of L_forget + lambda (L_retain - limit): max(0, lambda + eta (L_retain - limit))."""
    return max(0.0, weight + step_size * (retain_loss - limit))
