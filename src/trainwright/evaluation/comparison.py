"""Comparison of two models on the same rows, by paired differences."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainwright.evaluation.intervals import Estimate, difference
from trainwright.evaluation.measure import Measured
from trainwright.evaluation.metrics.registry import LIKELIHOODS


@dataclass(frozen=True)
class Comparison:
    """The differences, first minus second, by metric."""

    differences: dict[str, Estimate]
    notes: list[str] = field(default_factory=list)


def compare(one: Measured, other: Measured) -> Comparison:
    """Return the paired differences of all comparable metrics. Both must be measured on the same rows."""
    names = [name for name in one.columns if name in other.columns]
    notes = []
    if one.tokens != other.tokens and any(name in LIKELIHOODS for name in names):
        notes.append(
            "the two models have different tokenizers, chat templates or lengths, so their likelihoods cannot be "
            "compared"
        )
        names = [name for name in names if name not in LIKELIHOODS]
    return Comparison({name: difference(one.columns[name], other.columns[name]) for name in names}, notes)
