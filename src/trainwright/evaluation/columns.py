"""One metric over all rows: a value and a weight for each row, combined by their sums; and its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.evaluation.libraries import require

CONFIDENCE = 0.95
RESAMPLES = 2000
_SEED = 0
_Z = 1.959963984540054  # of the normal distribution, for CONFIDENCE
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

    @property
    def is_proportion(self) -> bool:
        """Whether the metric is the share of rows, or of their parts, that are right: every row entirely or not at all.

        A row's score of 0 or 1 is right or wrong; a score between them makes the metric a mean.
        """
        wrong, right = self.values == 0, self.values == self.weights
        return self.finish is _identity and bool((wrong | right).all())

    @property
    def effective_rows(self) -> float:
        """The number of rows of equal weight that would tell as much (Kish 1965)."""
        return float(self.weights.sum() ** 2 / (self.weights**2).sum())

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
    """Return the metric with its 95 % interval: of a proportion by Wilson's method, else the percentile interval
    (Efron and Tibshirani 1993, chapter 13), which would be a single point where all rows have the same value.
    """
    if len(column) > 1 and column.is_proportion:
        return Estimate(column.value(), *wilson(column.value(), column.effective_rows), len(column))

    def metric(values: Any, weights: Any, axis: int) -> Any:
        return column.finish(values.sum(axis) / weights.sum(axis))

    return Estimate(column.value(), *_interval(metric, [column], resamples), len(column))


def difference(one: Column, other: Column, resamples: int = RESAMPLES) -> Estimate:
    """Return ``one`` minus ``other`` on the same rows, with its interval. Both are resampled with the same rows, so
    that common variation cancels.
    """
    assert len(one) == len(other), "rows are compared one by one"
    if len(one) > 1 and one.is_proportion and other.is_proportion:
        return Estimate(one.value() - other.value(), *_paired_proportions(one, other), len(one))

    def metric(values: Any, weights: Any, others: Any, other_weights: Any, axis: int) -> Any:
        first = one.finish(values.sum(axis) / weights.sum(axis))
        return first - other.finish(others.sum(axis) / other_weights.sum(axis))

    return Estimate(one.value() - other.value(), *_interval(metric, [one, other], resamples), len(one))


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a proportion of ``count`` rows (Wilson 1927)."""
    spread = _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    # Rounding must not move the end of an interval away from 0 and 1.
    return (0.0 if share == 0 else max(0.0, middle - half)), (1.0 if share == 1 else min(1.0, middle + half))


def _paired_proportions(one: Column, other: Column) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two proportions of the same rows (Newcombe 1998, method 10)."""
    share, other_share = one.value(), other.value()
    low, high = wilson(share, one.effective_rows)
    other_low, other_high = wilson(other_share, other.effective_rows)
    both = float((one.values * other.values).sum() / (one.weights * other.weights).sum())
    spread = math.sqrt(share * (1 - share) * other_share * (1 - other_share))
    related = 0.0 if spread == 0 else (both - share * other_share) / spread
    down, up, other_down, other_up = share - low, high - share, other_share - other_low, other_high - other_share
    below = math.sqrt(max(0.0, down**2 - 2 * related * down * other_up + other_up**2))
    above = math.sqrt(max(0.0, up**2 - 2 * related * up * other_down + other_down**2))
    return share - other_share - below, share - other_share + above


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
