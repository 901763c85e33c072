"""One metric over all rows: a value and a weight for each row, combined by their sums; and its confidence interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.evaluation.libraries import require

CONFIDENCE = 0.95
RESAMPLES = 2000
_SEED = 0
_NUMBERS_AT_ONCE = 4_000_000


def _identity(mean: Any) -> Any:
    return mean


@dataclass(frozen=True)
class Column:
    """``finish(sum of values / sum of weights)`` is the metric: a mean over tokens, or with weights of 1 over rows."""

    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    finish: Callable[[Any], Any] = _identity

    @classmethod
    def of_rows(cls, scores: Sequence[float]) -> Column:
        """Return a column in which every row has the same weight."""
        return cls(np.array(scores, dtype=np.float64), np.ones(len(scores)))

    def __len__(self) -> int:
        return len(self.values)

    def chosen(self, rows: Sequence[int]) -> Column:
        """Return the column of some of the rows."""
        return Column(self.values[list(rows)], self.weights[list(rows)], self.finish)

    def value(self) -> float:
        """Return the metric over all rows."""
        return float(self.finish(self.values.sum() / self.weights.sum()))

    def row(self, index: int) -> float | None:
        """Return the metric of one row alone; None if it has no weight."""
        weight = self.weights[index]
        return float(self.finish(self.values[index] / weight)) if weight else None


@dataclass(frozen=True)
class Estimate:
    """A metric with its interval, over ``n`` rows. There is no interval of a single row."""

    value: float
    low: float | None
    high: float | None
    n: int


def estimate(column: Column, resamples: int = RESAMPLES) -> Estimate:
    """Return the metric with its 95 % percentile interval (Efron and Tibshirani 1993, chapter 13)."""

    def metric(values: Any, weights: Any, axis: int) -> Any:
        return column.finish(values.sum(axis) / weights.sum(axis))

    return Estimate(column.value(), *_interval(metric, [column], resamples), len(column))


def difference(one: Column, other: Column, resamples: int = RESAMPLES) -> Estimate:
    """Return ``one`` minus ``other`` on the same rows, with its interval. Both are resampled with the same rows, so
    that common variation cancels.
    """
    assert len(one) == len(other), "rows are compared one by one"

    def metric(values: Any, weights: Any, others: Any, other_weights: Any, axis: int) -> Any:
        first = one.finish(values.sum(axis) / weights.sum(axis))
        return first - other.finish(others.sum(axis) / other_weights.sum(axis))

    return Estimate(one.value() - other.value(), *_interval(metric, [one, other], resamples), len(one))


def _interval(metric: Any, columns: list[Column], resamples: int) -> tuple[float | None, float | None]:
    count = len(columns[0])
    if count < 2:
        return None, None
    require("scipy", "a confidence interval")
    from scipy.stats import bootstrap

    found = bootstrap(
        tuple(array for column in columns for array in (column.values, column.weights)),
        metric,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=resamples,
        confidence_level=CONFIDENCE,
        batch=max(1, _NUMBERS_AT_ONCE // (count * len(columns) * 2)),
        rng=np.random.default_rng(_SEED),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
