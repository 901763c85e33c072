"""Dual ascent of PDU (arXiv 2506.05314): forget as far as the retain loss stays within its limit."""

from __future__ import annotations


def ascended(weight: float, retain_loss: float, limit: float, step_size: float) -> float:
    """Return the multiplier of L_forget + lambda (L_retain - limit) after a step: max(0, lambda + eta (L_retain -
    limit)).
    """
    return max(0.0, weight + step_size * (retain_loss - limit))
