"""Fit the curves of a calibration to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from trainwright.machine.measured.calibration import FORMS, Curve, TimedSample

Numbers = np.ndarray[Any, np.dtype[np.float64]]

# Form of a curve by the first part of its name; all others are tables.
_FORM = {
    "product": "product",
    "collective": "amount",
    "host": "amount",
    "loss": "amount",
    "data": "batch",
}


def curve_of(name: str, rows: Sequence[Mapping[str, Any]]) -> Curve:
    """Return the curve ``name`` through the rows that are not held out.

    Each row has ``sizes``, ``seconds`` and ``held_out``.
    """
    samples = tuple(TimedSample(tuple(row["sizes"]), row["seconds"], row["held_out"]) for row in rows)
    form = _FORM.get(name.partition("/")[0], "table")
    if form == "table":
        return Curve(form, samples)
    return Curve(form, samples, fit(form, [sample for sample in samples if not sample.held_out]))


def fit(form: str, samples: Sequence[TimedSample]) -> tuple[float, ...]:
    """Return non-negative coefficients with the least sum of squared relative errors."""
    rows = np.array([[term / sample.seconds for term in FORMS[form](*sample.sizes)] for sample in samples])
    scale = rows.max(axis=0)
    coefficients = non_negative(rows / scale, np.ones(len(samples)))
    return tuple(float(value) for value in coefficients / scale)


def non_negative(rows: Numbers, targets: Numbers) -> Numbers:
    """Return the non-negative x [N] with the least squared error of ``rows`` [M, N] @ x from ``targets`` [M].

    See Lawson and Hanson 1974, ch. 23. With few unknowns, every set of non-zero ones is tried.
    """
    best, least = np.zeros(rows.shape[1]), float(np.square(targets).sum())
    for count in range(1, min(rows.shape) + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            coefficients, *_ = np.linalg.lstsq(rows[:, chosen], targets, rcond=None)
            off = float(np.square(rows[:, chosen] @ coefficients - targets).sum())
            if off < least and (coefficients >= 0).all():
                best, least = np.zeros(rows.shape[1]), off
                best[list(chosen)] = coefficients
    return best
