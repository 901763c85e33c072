"""The number of examples of each step of a run, with an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchSizes:
    """``final`` examples per step; in the first ``steps`` steps the number grows linearly from ``initial``."""

    final: int
    initial: int | None = None
    steps: int = 0

    def at(self, step: int) -> int:
        """Return the number of examples of ``step``, counted from 0."""
        if self.initial is None or step >= self.steps:
            return self.final
        return self.initial + (self.final - self.initial) * step // self.steps

    def before(self, step: int) -> int:
        """Return the number of examples of all steps before ``step``."""
        growing = min(step, self.steps) if self.initial is not None else 0
        return sum(map(self.at, range(growing))) + (step - growing) * self.final

    def steps_for(self, examples: int) -> int:
        """Return the number of steps for ``examples`` examples; the last step may be smaller."""
        ends = np.cumsum([self.at(step) for step in range(self.steps if self.initial is not None else 0)], dtype=int)
        if len(ends) and examples <= ends[-1]:
            return int(np.searchsorted(ends, examples, side="left")) + 1
        grown = int(ends[-1]) if len(ends) else 0
        return len(ends) + -(-(examples - grown) // self.final)
