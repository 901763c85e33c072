"""What a run knows of its losses and gradients beside their size: spikes, and the noise of batches.

Both are sums that decay from step to step; they are part of a checkpoint, so that a run that is resumed decides as the
one that was not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A mean over about the last hundred steps; before so many steps a loss still falls too fast to be called odd.
_DECAY = 0.99
_FIRST = 50
# So many in a row are no spike, but what the loss is now.
_IN_A_ROW = 10


@dataclass
class Losses:
    """Mean and variance of the losses of late; ``odd``: how many in a row were far above."""

    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0
    odd: int = 0

    def is_spike(self, loss: float, deviations: float) -> bool:
        """Whether a loss is so many standard deviations above the mean; one that is not is taken in."""
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
class Noise:
    """The gradient noise scale of McCandlish et al. (arXiv 1812.06162, appendix A.1).

    The squared norm of a batch's mean gradient is that of the true one and the noise over the batch's size; two sizes
    give both.
    """

    squared: float = 0.0  # |G|^2, and what it is divided by cancels in the ratio
    trace: float = 0.0  # tr(S)

    def add(self, small: tuple[float, float], large: tuple[float, float]) -> float | None:
        """Take in the norms of the mean gradients of two batches, each with its size; the noise scale in that unit.

        None while noise is all that is seen.
        """
        (norm, size), (whole_norm, whole_size) = small, large
        squared = (whole_size * whole_norm**2 - size * norm**2) / (whole_size - size)
        trace = (norm**2 - whole_norm**2) / (1 / size - 1 / whole_size)
        self.squared = 0.9 * self.squared + 0.1 * squared
        self.trace = 0.9 * self.trace + 0.1 * trace
        return self.trace / self.squared if self.squared > 0 and self.trace > 0 else None
