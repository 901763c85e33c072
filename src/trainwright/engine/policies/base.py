"""Step policies: what is decided about an optimizer step beside its gradients, each in a small class of its own.

The training loop asks them in the order of ``policies_of``. Ours are the out-of-memory halving, the loss scale of
fp16, the noise scale of batches, and the guard against spikes of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.event_log import EventLog
from trainwright.engine.out_of_memory import Shortage
from trainwright.engine.progress import Progress
from trainwright.engine.task import Task
from trainwright.parallel.strategy import Strategy
from trainwright.recipe.loading import dump_recipe
from trainwright.recipe.schema import Recipe


class Report(NamedTuple):
    """What a rank tells all others after its passes of a step, as floats."""

    loss: float  # summed over its micro-batches
    stop: float  # whether it was asked to stop
    memory: float  # peak bytes
    short: float  # whether memory ran out
    save: float  # whether a checkpoint is due; rank 0's counts


@dataclass(frozen=True)
class Gradients:
    """The gradients of a global batch, which the strategy holds, in numbers.

    Attributes:
        loss: mean over the global batch, the same on every rank.
        norm: of the gradient of the whole model, the same on every rank.
        reports: of every rank.
        losses: summed loss of each of this rank's micro-batches.
        statistics: sums for the task's metrics of the step, of this rank.
        shortage: how memory ran out on this rank; the other numbers then mean nothing.
    """

    batch: GlobalBatch
    loss: float
    norm: float
    reports: Sequence[Report]
    losses: list[float]
    statistics: list[float]
    shortage: Shortage | None = None


@dataclass
class Training:
    """A run under way: what a policy may look at, and ``progress``, which it may change.

    Attributes:
        recipe_text: goes into checkpoints.
        keep_recipe: called on every rank with a recipe that the run goes on with, and why; gives its text.
    """

    recipe: Recipe
    recipe_text: str
    task: Task
    strategy: Strategy
    events: EventLog
    progress: Progress
    keep_recipe: Callable[[Recipe, str], str] = lambda recipe, reason: dump_recipe(recipe)


class StepPolicy:
    """The base of step policies, which does nothing. Every rank calls every method, in one order.

    Attributes:
        state: numbers that a checkpoint keeps under the policy's name.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.state: dict[str, float] = {}

    def before(self, step: int, batch: GlobalBatch, gradients: Callable[[GlobalBatch], Gradients]) -> None:
        """Look at a batch before its gradients are computed.

        Args:
            gradients: computes those of another batch; the strategy is to have none when this returns.
        """

    def again(self, step: int, found: Gradients) -> GlobalBatch | None:
        """Return the batch to compute gradients of once more, in place of ``found``; None: take those.

        Raises:
            TrainingError: training cannot go on.
        """
        return None

    def metrics(self, step: int, found: Gradients) -> dict[str, float]:
        """Return the metrics for the step's event."""
        return {}

    def skips(self, step: int, found: Gradients) -> bool:
        """Return whether the step's update is to be left out; the same on every rank."""
        return False

    def after(self, step: int) -> None:
        """Take note that a step is done."""
