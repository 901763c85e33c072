"""One metric over all rows: a value and a weight for each row, combined by their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


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
