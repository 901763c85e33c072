"""Built-in step policies: loss scale of fp16, gradient noise, loss spikes and numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.events import Fault
from trainwright.engine.policies.base import RewindRequested, StepGradients, StepPolicy, Training, WrongNumbers

# The values of torch.amp.GradScaler.
_FIRST_LOSS_SCALE = 2.0**16
_GROW_LOSS_SCALE_EVERY = 2000
# Of steps that are skipped or left out because of their numbers; the next one ends the run.
MAX_IN_A_ROW = 10


class LossScale(StepPolicy):
    """Halve the loss scale of fp16 when gradients overflow, and double it after many steps without overflow.

    A step whose gradients overflow is repeated at half the scale, so no example is lost.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._scaled = training.recipe.train.mixed_precision == "fp16"
        if self._scaled:
            training.progress.loss_scale = _FIRST_LOSS_SCALE

    def again(self, step: int, gradients: StepGradients) -> GlobalBatch | None:
        """Return the batch itself if its gradients overflowed and the scale can be reduced."""
        progress = self.training.progress
        overflowed = math.isfinite(gradients.loss) and not math.isfinite(gradients.norm)
        if not (self._scaled and overflowed and progress.loss_scale > 1):
            return None
        self.training.strategy.discard_gradients()
        progress.loss_scale /= 2
        progress.steps_at_scale = 0
        action = f"the step is repeated with loss scale {progress.loss_scale:g}"
        self.training.events.emit(Fault(kind="overflow", rank=0, detail="fp16 gradients", action=action, step=step))
        return gradients.batch

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

    def metrics(self, step: int, gradients: StepGradients) -> dict[str, float]:
        """Return the noise scale, once there is an estimate."""
        if self._small is None:
            return {}
        noise = self.training.progress.noise.add(self._small, (gradients.norm, float(gradients.batch.examples)))
        return {} if noise is None else {"gradient_noise_scale": noise}


class LossSpikes(StepPolicy):
    """Handle steps whose loss is far above the mean of the previous ones (train.skip_loss_spikes)."""

    def skips(self, step: int, gradients: StepGradients) -> bool:
        """Return whether the loss is a spike whose update is skipped."""
        recipe, losses = self.training.recipe, self.training.progress.losses
        limit = recipe.train.skip_loss_spikes
        if limit is None or not losses.is_spike(gradients.loss, limit):
            return False
        detail = f"loss {gradients.loss:.4g} at step {step}, mean of previous steps {losses.mean:.4g}"
        handle_wrong_numbers(self.training, recipe.faults.on_loss_spike, "loss_spike", 0, detail, step)
        return True


class LossLimit(StepPolicy):
    """End the run if the loss stays above a limit (train.max_loss)."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._limit = training.recipe.train.max_loss
        if self._limit is not None:
            self.state = {"above": 0.0}

    def skips(self, step: int, gradients: StepGradients) -> bool:
        """Count the steps above the limit; raise WrongNumbers at the last one that is allowed."""
        if self._limit is None:
            return False
        self.state["above"] = self.state["above"] + 1 if gradients.loss > self._limit else 0.0
        if self.state["above"] >= self.training.recipe.train.max_loss_steps:
            detail = f"loss {gradients.loss:.4g} at step {step} is above train.max_loss {self._limit:g}"
            if self.state["above"] > 1:
                detail = f"{detail}, for {self.state['above']:.0f} steps in a row"
            handle_wrong_numbers(self.training, "stop", "loss_limit", 0, detail, step)
        return False


class NonFinite(StepPolicy):
    """Skip updates from losses or gradients that are not finite (faults.on_non_finite: skip)."""

    def skips(self, step: int, gradients: StepGradients) -> bool:
        """Return whether the loss or the norm of the gradient is not finite."""
        progress = self.training.progress
        progress.non_finite = 0 if gradients.is_finite else progress.non_finite + 1
        if progress.non_finite > MAX_IN_A_ROW:
            raise WrongNumbers(f"training stopped: {MAX_IN_A_ROW} steps in a row have no finite numbers")
        return not gradients.is_finite


def handle_wrong_numbers(training: Training, what: str, kind: str, rank: int, detail: str, step: int) -> None:
    """Report a step with wrong numbers; return if its update is to be skipped.

    Args:
        what: ``stop``, ``skip`` or ``rewind``.

    Raises:
        WrongNumbers: the run ends.
        RewindRequested: the run goes back to its newest checkpoint.
    """
    if what == "rewind":
        raise RewindRequested(kind, rank, detail)
    action = "stop" if what == "stop" else "its update is skipped"
    training.events.emit(Fault(kind=kind, rank=rank, detail=detail, action=action, step=step))
    if what == "stop":
        raise WrongNumbers(f"training stopped: {detail}")
