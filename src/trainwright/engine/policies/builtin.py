"""Built-in step policies: loss scale of fp16, gradient noise, loss spikes."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.events import Fault
from trainwright.engine.policies.base import StepGradients, StepPolicy, Training

# The values of torch.amp.GradScaler.
_FIRST_LOSS_SCALE = 2.0**16
_GROW_LOSS_SCALE_EVERY = 2000


class LossScale(StepPolicy):
    """Halve the loss scale of fp16 when gradients overflow, and double it after many steps without overflow.

    A step whose gradients overflow is repeated at half the scale, so no example is lost.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._scaled = training.recipe.train.mixed_precision == "fp16"
        if self._scaled:
            training.progress.loss_scale = _FIRST_LOSS_SCALE

    def again(self, step: int, found: StepGradients) -> GlobalBatch | None:
        """Return the batch itself if its gradients overflowed and the scale can be reduced."""
        progress = self.training.progress
        overflowed = math.isfinite(found.loss) and not math.isfinite(found.norm)
        if not (self._scaled and overflowed and progress.loss_scale > 1):
            return None
        self.training.strategy.discard_gradients()
        progress.loss_scale /= 2
        progress.steps_at_scale = 0
        action = f"the step is repeated with loss scale {progress.loss_scale:g}"
        self.training.events.emit(Fault(kind="overflow", rank=0, detail="fp16 gradients", action=action, step=step))
        return found.batch

    def after(self, step: int) -> None:
        """Count the step, and double the scale after enough steps."""
        progress = self.training.progress
        progress.steps_at_scale += 1
        if self._scaled and progress.steps_at_scale >= _GROW_LOSS_SCALE_EVERY:
            progress.loss_scale *= 2
            progress.steps_at_scale = 0


class GradientNoise(StepPolicy):
    """Estimate the gradient noise scale from a batch and its first half (train.gradient_noise_scale)."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._every = training.recipe.train.gradient_noise_scale
        self._small: tuple[float, float] | None = None

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], StepGradients]) -> None:
        """Compute the norm of the mean gradient of the first half of the batch."""
        self._small, size = None, batch.examples // 2
        if self._every is None or step % self._every or not size:
            return
        stream = self.training.task.stream
        half = stream.divide(stream.examples(step - 1)[:size], batch.rows)
        norm = gradients(half).norm
        self.training.strategy.discard_gradients()
        self._small = norm, float(half.examples)

    def metrics(self, step: int, found: StepGradients) -> dict[str, float]:
        """Return the noise scale, once there is an estimate."""
        if self._small is None:
            return {}
        noise = self.training.progress.noise.add(self._small, (found.norm, float(found.batch.examples)))
        return {} if noise is None else {"gradient_noise_scale": noise}


class LossSpikes(StepPolicy):
    """Skip updates whose loss is far above the mean of the previous steps (train.skip_loss_spikes)."""

    def skips(self, step: int, found: StepGradients) -> bool:
        """Return whether the loss is a spike."""
        limit, losses = self.training.recipe.train.skip_loss_spikes, self.training.progress.losses
        if limit is None or not losses.is_spike(found.loss, limit):
            return False
        detail = f"loss {found.loss:.4g} at step {step}, mean of previous steps {losses.mean:.4g}"
        fault = Fault(kind="loss_spike", rank=0, detail=detail, action="its update is skipped", step=step)
        self.training.events.emit(fault)
        return True
