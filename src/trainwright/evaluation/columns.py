"""One metric over all rows: a value and a weight for each, and what their sums make."""

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
        """Every row counts the same."""
        return cls(np.array(scores, dtype=np.float64), np.ones(len(scores)))

    def __len__(self) -> int:
        return len(self.values)

    def chosen(self, rows: Sequence[int]) -> Column:
        """Return the same of some of the rows."""
        return Column(self.values[list(rows)], self.weights[list(rows)], self.finish)

    def value(self) -> float:
        """Return the metric over all rows."""
        return float(self.finish(self.values.sum() / self.weights.sum()))

    def row(self, index: int) -> float | None:
        """Return the metric of one row alone; None where it has no weight."""
        weight = self.weights[index]
        return float(self.finish(self.values[index] / weight)) if weight else None
