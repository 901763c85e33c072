"""Random numbers that depend on who draws and on the how-manieth draw, and on nothing else.

A goal's history is then the same whichever goals are simulated beside it, in however many processes.
"""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seeds: torch.Tensor, draw: int) -> torch.Tensor:
    """One number in [0, 1) for each seed.

    SplitMix64 as a counter-based generator (Steele, Lea and Flood, 2014, doi 10.1145/2660193.2660195).

    Args:
        seeds: int64, any shape. Seeds that follow one another give independent numbers.
        draw: the number of the draw; another one gives other numbers.
    Returns:
        float32 of the same shape.
    """
    return (mixed(mixed(seeds) + draw) & 0xFFFFFF).float() * 2**-24


def mixed(values: torch.Tensor) -> torch.Tensor:
    """Scramble int64 numbers so that each bit of the result depends on every bit of the number."""
    values = values + _GOLDEN
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    # The sign bit is a bit like another, so what is shifted in has to be zeros.
    return (values >> bits) & ((1 << (64 - bits)) - 1)
