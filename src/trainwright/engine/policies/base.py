"""Step policies: decisions about an optimizer step, each in a small class.

The training loop calls the built-in ones first, then those that the recipe names. The built-in ones handle
out-of-memory halving, the loss scale of fp16, the gradient noise scale, replayed steps, slow ranks, losses
above a limit or not finite, and loss spikes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.events import EventLog, Fault
from trainwright.engine.out_of_memory import MemoryShortage
from trainwright.engine.progress import TrainingProgress
from trainwright.engine.task import Task
from trainwright.errors import EXIT_FAULT, TrainingError
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import World
from trainwright.recipe.loading import dump_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.utils.text import format_ranks


class RankReport(NamedTuple):
    """What a rank sends to all others after its passes of a step, as floats."""

    loss: float  # sum over its micro-batches
    stop: float  # whether it was asked to stop
    memory: float  # peak bytes
    out_of_memory: float  # whether memory ran out
    save: float  # whether a checkpoint is due; rank 0's counts
    step: float = 0.0  # whose gradients it has computed
    written: float = 0.0  # how far its part of the checkpoint in the background is
    resident: float = 0.0  # bytes of its process in the host's memory now
    # Its seconds in these phases since its last report, without those in collectives; of those only in which it did not
    # run.
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True)
class StepGradients:
    """Numbers about the gradients of a global batch; the strategy holds the gradients.

    Attributes:
        loss: mean over the global batch, the same on every rank.
        norm: of the gradient of the full model, the same on every rank.
        reports: one of each rank.
        losses: summed loss of each of this rank's micro-batches.
        statistics: the sums for the task's metrics of the step, over all ranks.
        shortage: the out-of-memory error of this rank; if set, the other numbers are meaningless.
    """

    batch: GlobalBatch
    loss: float
    norm: float
    reports: Sequence[RankReport]
    losses: list[float]
    statistics: list[float] = field(default_factory=list)
    shortage: MemoryShortage | None = None

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and the norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class WrongNumbers(TrainingError):
    """The loss or the gradient of a step ends the run; raised on every rank, before the weights are changed."""


class Corrupted(WrongNumbers):
    """A machine computed or kept wrong numbers, which the run cannot go back from."""

    exit_code = EXIT_FAULT


class RewindRequested(TrainingError):
    """The run goes back to its newest checkpoint; raised on every rank, before the weights are changed.

    Args:
        kind: of the `fault` event.
        rank: the first rank on which it was found.
        leave_out: whether to leave out the batch of the step.
        before: later checkpoints, and that of this step, are not to be used; None: all can be.
    """

    def __init__(self, kind: str, rank: int, detail: str, *, leave_out: bool = True, before: int | None = None) -> None:
        super().__init__(f"training stopped: {detail}")
        self.kind, self.rank, self.detail = kind, rank, detail
        self.leave_out, self.before = leave_out, before


@dataclass
class TrainingContext:
    """A run in progress: what a policy may read, and ``progress``, which it may change.

    Attributes:
        recipe: changed by out-of-memory halving.
        recipe_text: saved in checkpoints.
        keep_recipe: called on every rank with a changed recipe and the reason; returns its text.
    """

    recipe: RecipeSchema
    recipe_text: str
    task: Task
    strategy: Strategy
    events: EventLog
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    keep_recipe: Callable[[RecipeSchema, str], str] = lambda recipe, reason: dump_recipe(recipe)

    @property
    def world(self) -> World:
        """Return the processes of the run."""
        return self.strategy.world


class StepPolicy:
    """The base class of step policies, which does nothing. Every rank calls every method in the same order.

    Attributes:
        state: numbers that a checkpoint saves under the name of the class; resuming and rewinding replace them.
    """

    def __init__(self, training: TrainingContext) -> None:
        self.training = training
        self.state: dict[str, float] = {}

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], StepGradients]) -> None:
        """Inspect a batch before its gradients are computed.

        Args:
            gradients: computes those of another batch; the strategy must have none when this returns.
        """

    def again(self, step: int, gradients: StepGradients) -> GlobalBatch | None:
        """Return the batch to compute gradients of again, replacing ``gradients``, or None to accept them.

        Raises:
            TrainingError: training cannot continue.
        """
        return None

    def metrics(self, step: int, gradients: StepGradients) -> dict[str, float]:
        """Return the metrics for the step's event."""
        return {}

    def skips(self, step: int, gradients: StepGradients) -> bool:
        """Return whether to skip the step's update; the same on every rank."""
        return False

    def after(self, step: int) -> None:
        """Handle the end of a step."""


def check_skips(step: int, policies: Sequence[StepPolicy], skipped: Sequence[bool], world: World) -> None:
    """Compare before an update which of the recipe's policies skip it; nothing is exchanged for those that never do.

    Raises:
        TrainingError: on every rank, if they have not decided the same.
    """
    with_skips = [policy for policy in policies if type(policy).skips is not StepPolicy.skips]
    if not with_skips:
        return
    decisions = [float(skip) for policy, skip in zip(policies, skipped, strict=True) if policy in with_skips]
    for policy, of_ranks in zip(with_skips, zip(*world.gather_floats(decisions), strict=True), strict=True):
        if len(set(of_ranks)) > 1:
            ranks = ([rank for rank, skip in enumerate(of_ranks) if bool(skip) is kind] for kind in (True, False))
            skipping, other_ranks = map(format_ranks, ranks)
            raise TrainingError(
                f"the step policy {type(policy).__module__}:{type(policy).__qualname__} skips the update of step "
                f"{step} on {skipping} and not on {other_ranks}; its method skips must return the same on every rank. "
                "Correct it, and --resume"
            )


def check_steps(steps: Sequence[int]) -> None:
    """Raise TrainingError, on every rank, if the ranks are not at the same step. ``steps``: that of each rank."""
    if len(set(steps)) == 1:
        return
    usual = Counter(steps).most_common(1)[0][0]
    ranks = [rank for rank, step in enumerate(steps) if step != usual]
    raise TrainingError(
        f"{format_ranks(ranks)} computed step {steps[ranks[0]]} when the other ranks computed step {usual}: a step "
        "policy repeated or added a pass on some ranks only. Its methods before and again must do the same on every "
        "rank. Correct it, and --resume"
    )


# The values of torch.amp.GradScaler.
_FIRST_LOSS_SCALE = 2.0**16
_GROW_LOSS_SCALE_EVERY = 2000
# Of steps that are skipped or left out because of their numbers; the next one ends the run.
MAX_IN_A_ROW = 10


class LossScale(StepPolicy):
    """Halve the loss scale of fp16 when gradients overflow, and double it after many steps without overflow.

    A step whose gradients overflow is repeated at half the scale, so no example is lost.
    """

    def __init__(self, training: TrainingContext) -> None:
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

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._every = training.recipe.train.gradient_noise_scale
        self._small: tuple[float, float] | None = None

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], StepGradients]) -> None:
        """Compute the norm of the mean gradient of the first half of the batch."""
        self._small, size = None, batch.examples // 2
        if self._every is None or step % self._every or not size:
            return
        stream = self.training.task.stream
        half = stream.divide(stream.examples(step - 1)[:size], batch.rows, batch.micro_batches[0].max_length)
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

    def __init__(self, training: TrainingContext) -> None:
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


def handle_wrong_numbers(training: TrainingContext, what: str, kind: str, rank: int, detail: str, step: int) -> None:
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
