"""Random numbers that depend only on a seed and a draw index.

So the history of a goal does not depend on the other goals or the number of processes.
"""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seeds: torch.Tensor, draw: int) -> torch.Tensor:
    """Return one number in [0, 1) for each seed.

    SplitMix64 as a counter-based generator (Steele, Lea and Flood, 2014, doi 10.1145/2660193.2660195).

    Args:
        seeds: int64, any shape. Consecutive seeds give independent numbers.
        draw: the draw index; different draws give different numbers.
        Returns:
        float32 of the same shape.
    """
    return (mixed(mixed(seeds) + draw) & 0xFFFFFF).float() * 2**-24


def mixed(values: torch.Tensor) -> torch.Tensor:
    """Mix int64 numbers so that each bit of the result depends on every bit of the input."""
    values = values + _GOLDEN
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    # The shift must be logical: fill with zeros instead of the sign bit.
    return (values >> bits) & ((1 << (64 - bits)) - 1)
