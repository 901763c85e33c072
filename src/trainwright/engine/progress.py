"""The progress of a run: everything a checkpoint holds that is not a tensor.

Statistics of losses and gradients are exponentially decayed sums; they are saved in checkpoints, so that a resumed run
decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

EVALUATION, GENERATION = "evaluation", "generation"
# A mean over about the last hundred steps; in the first steps the loss falls too fast to detect spikes.
_DECAY = 0.99
_FIRST = 50
# This many in a row are not a spike but a new level of the loss.
_IN_A_ROW = 10


@dataclass
class LossStatistics:
    """Running mean and variance of the loss; ``odd``: the number of consecutive losses far above the mean."""

    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0
    odd: int = 0

    def is_spike(self, loss: float, deviations: float) -> bool:
        """Return whether a loss is ``deviations`` standard deviations above the mean; if not, add it to the mean."""
        if not math.isfinite(loss):
            return False
        above = loss - self.mean
        far = self.seen >= _FIRST and above > deviations * math.sqrt(self.variance)
        self.odd = self.odd + 1 if far else 0
        if far and self.odd <= _IN_A_ROW:
            return True
        weight = max(1 - _DECAY, 1 / (self.seen + 1))
        self.seen += 1
        self.mean += weight * above
        self.variance = (1 - weight) * (self.variance + weight * above * above)
        return False


@dataclass
class Patience:
    """The best value of a series that should fall, and the number of values since then."""

    best: float | None = None
    since: int = 0

    def add(self, value: float, limit: Callable[[float], float]) -> int:
        """Add a value, the best if it is below ``limit`` of the best before; return the number since the best."""
        better = self.best is None or value < limit(self.best)
        self.best, self.since = (value, 0) if better else (self.best, self.since + 1)
        return self.since


@dataclass
class Noise:
    """The gradient noise scale of McCandlish et al. (arXiv 1812.06162, appendix A.1).

    The squared norm of a batch's mean gradient is that of the true gradient plus the noise divided by the batch size;
    two batch sizes give both.
    """

    squared: float = 0.0  # |G|^2; common factors cancel in the ratio
    trace: float = 0.0  # tr(S)

    def add(self, small: tuple[float, float], large: tuple[float, float]) -> float | None:
        """Add the norms of the mean gradients of two batches, each with its size; return the noise scale in that
        unit.

        Return None while the estimate is only noise.
        """
        (norm, size), (full_norm, full_size) = small, large
        if not (math.isfinite(norm) and math.isfinite(full_norm)):
            return None
        squared_norm = (full_size * full_norm**2 - size * norm**2) / (full_size - size)
        trace = (norm**2 - full_norm**2) / (1 / size - 1 / full_size)
        self.squared = 0.9 * self.squared + 0.1 * squared_norm
        self.trace = 0.9 * self.trace + 0.1 * trace
        return self.trace / self.squared if self.squared > 0 and self.trace > 0 else None


@dataclass
class TrainingProgress:
    """The progress of a run: everything a checkpoint holds that is not a tensor."""

    step: Annotated[int, Field(ge=0)] = 0  # also the position in the stream
    tokens: int = 0
    target_tokens: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    loss_scale: float = 1.0  # fp16 only: factor on the loss so that small gradients do not vanish
    steps_at_scale: int = 0
    losses: LossStatistics = field(default_factory=LossStatistics)  # for train.skip_loss_spikes
    noise: Noise = field(default_factory=Noise)  # for train.gradient_noise_scale
    non_finite: int = 0  # number of consecutive steps that were skipped because their numbers are not finite
    left_out: list[int] = field(default_factory=list)  # steps whose global batches are not trained on
    stopping: Patience = field(default_factory=Patience)  # for evaluate.early_stopping
    plateau: Patience = field(default_factory=Patience)  # for the schedule reduce_on_plateau
    rate: float = 1.0  # the part of the learning rate that it has left
    pending: str | None = None  # what a stop interrupted after the step: EVALUATION, or GENERATION alone

    @classmethod
    def of(cls, saved: dict[str, Any]) -> TrainingProgress:
        """Build from the content of a checkpoint. Raises ValueError if it is invalid."""
        try:
            return TypeAdapter(cls).validate_python(saved, extra="forbid")
        except ValidationError as error:
            problem = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
