"""Whether the learning rate is a likely cause of numbers that are not finite."""

from __future__ import annotations

import math
from collections import deque

from trainwright.engine.policies.base import StepGradients
from trainwright.recipe.schema import OptimizerSection

# AdamW, and Muon with updates scaled to those of AdamW, use up to some 1e-3 for large models and 6e-3 for tiny ones.
_USUAL = "1e-6 to 1e-3"
_FAR_ABOVE = 2e-2
_STEPS = 100
_NORM_GROWS = 100.0


class Divergence:
    """Keep the newest finite losses and gradient norms, and say what they tell about the learning rate."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_STEPS)
        self._norms: deque[float] = deque(maxlen=_STEPS)

    def add(self, found: StepGradients) -> None:
        """Add the numbers of a step, if they are finite."""
        if found.is_finite:
            self._losses.append(found.loss)
            self._norms.append(found.norm)

    def advice(self, optimizer: OptimizerSection, rate: float, updates: int) -> str:
        """Return why the learning rate is a likely cause, and what to do; "" if nothing points to it.

        Args:
            rate: of the last update.
            updates: made before these numbers; without any, the learning rate has had no effect yet.
        """
        if updates <= 0 or rate == 0.0:
            return ""
        why = []
        if rate > _FAR_ABOVE:
            why.append(f"{optimizer.name} is usually trained with {_USUAL}")
        if self._losses and self._losses[-1] - (lowest := min(self._losses)) > 1.0 + abs(lowest):
            why.append(f"the loss had grown from {lowest:.4g} to {self._losses[-1]:.4g}")
        elif self._norms and self._norms[-1] > _NORM_GROWS * max(least := min(self._norms), math.ulp(1.0)):
            why.append(f"the gradient norm had grown from {least:.4g} to {self._norms[-1]:.4g}")
        if not why:
            return ""
        clip = ", or set optimizer.max_grad_norm to 1.0" if optimizer.max_grad_norm is None else ""
        return (
            f"the likely cause is optimizer.learning_rate {optimizer.learning_rate:g} ({rate:g} in the last update): "
            f"{' and '.join(why)}; lower it, raise optimizer.warmup_steps{clip}"
        )
