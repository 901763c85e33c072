"""The interface between the engine and a task. A task does not depend on ranks, strategies or accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from trainwright.data.stream.stream import GlobalBatch, MicroBatch, Stream
from trainwright.engine.out_of_memory import MemoryShortage, catch_shortage
from trainwright.errors import RequestError
from trainwright.models.weights import Weights
from trainwright.parallel.strategy import Independent, Strategy
from trainwright.parallel.world import World
from trainwright.recipe.schema import RecipeSchema
from trainwright.utils import heartbeat


@dataclass(frozen=True)
class LossSum:
    """The sum of the per-target losses of a micro-batch, and the sum of the targets' weights.

    The engine divides by the weight of the global batch, over all ranks and micro-batches. ``statistics``: additional
    sums for metrics of the step.
    """

    total: torch.Tensor
    weight: float
    statistics: torch.Tensor | None = None


@dataclass(frozen=True)
class Measured:
    """Metrics of an evaluation.

    Attributes:
        intervals: 95 % intervals of those that are proportions.
        samples: what the answers were, as lines of JSON.
        cut: how many answers were cut at ``limit`` tokens; there are as many answers as ``samples``.
    """

    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    cut: int = 0
    limit: int = 0


class Task(Protocol):
    """A model, the stream of its examples, and the loss that connects them."""

    module: nn.Module
    weights: Weights | None  # fills the module if its parameters are on the meta device; None: the module is complete
    stream: Stream
    validation: Stream | None
    prompts: Sequence[str]
    answers: bool  # whether an evaluation has metrics of the model's answers
    start: str | None  # fingerprint of the initial weights, known after begin(); None: no loss needs them later
    base: str | None  # fingerprint of the frozen weights under an adapter; None: all weights are trained

    state: dict[str, float]  # numbers of the task that training changes; saved in checkpoints

    def blocks(self) -> list[nn.Module]:
        """Return the repeated units of the module, in order."""

    def begin(
        self, passes: ForwardOnly, weights: Iterable[tuple[str, torch.Tensor]], notify: Callable[[str], None]
    ) -> None:
        """Start the task; called once on every rank, with the initial weights distributed and no checkpoint loaded yet.

        Args:
            passes: runs the model.
            weights: its full parameters and buffers by name; either all ranks iterate or none.
            notify: shows a line to the user; only rank 0's are seen.
        """

    def before_passes(self, passes: ForwardOnly, batch: GlobalBatch, *, validation: bool) -> None:
        """Prepare for the passes over a global batch, for example if the loss needs statistics of the full batch.
        Called on every rank.

        Args:
            passes: runs the model.
            validation: whether the batch is of the validation stream.
        """

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the losses of one micro-batch of the stream."""

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return a vector of sums over one micro-batch of the validation stream; 0 where its weight is 0."""

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics of the validation split or a step, from summed statistics; for `loss`, lower is better."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Handle an update of the weights; called on every rank with the metrics of the step."""

    def answer_metrics(self, module: nn.Module, world: World, *, together: bool) -> Measured:
        """Return metrics of the model's answers to validation rows; called on every rank if ``answers`` is true.

        Args:
            module: the full module, for generation.
            together: whether every rank answers everything, because each pass of the module involves all ranks.
        """

    def generate(self, module: nn.Module, prompt: str) -> str:
        """Return the model's greedy answer to a prompt."""

    def describe(self) -> dict[str, Any]:
        """Return the fields of the `start` event that are specific to the task."""

    def describe_example(self, index: int) -> str:
        """Return a short description of an example of the stream, for error messages."""

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write the model, given its full parameters and buffers by name; an adapter, given its own parameters.

        Raises:
            TrainingError: something is missing, or reading it back gives other values.
        """

    def adds_nothing(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether an adapter with these parameters leaves the model unchanged."""

    def read_back(self, module: nn.Module, directory: Path | None, *, all_parameters: bool) -> str | None:
        """Check that the exported model, or the exported adapter on its base, gives the trained model's logits.

        Return why it was not compared, or None.

        Args:
            module: as for generation; if not ``all_parameters``, all ranks run it together.
            directory: the export; None: another rank reads the full model, and this one only runs the module.

        Raises:
            TrainingError: weights or logits differ.
        """


@runtime_checkable
class CollatesAhead(Protocol):
    """A task that can make the tensors of a micro-batch before it is needed."""

    def collate_ahead(self, micro: MicroBatch) -> None:
        """Collate a micro-batch of the stream on the host, for the call of ``loss`` that may follow."""


class ForwardOnly:
    """Runs a distributed model without gradients, for tasks that need its outputs outside of the loss."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def world(self) -> World:
        """Return the ranks that the model is distributed over."""
        return self._strategy.world

    @property
    def repeatable(self) -> bool:
        """Return whether passes that ran out of memory can be repeated: no rank waits for another within them."""
        return isinstance(self._strategy, Independent)

    def __call__(self, batches: Iterable[GlobalBatch], visit: Callable[[nn.Module, MicroBatch], None]) -> None:
        """Call ``visit`` with the model, in evaluation mode, and each of this rank's micro-batches.

        Every rank must call. For a micro-batch of weight 0, ``visit`` runs a zero-weight pass so that collectives
        match, and ignores the result.

        Raises:
            torch.OutOfMemoryError: memory ran out on some rank; raised on all ranks at once unless they wait for each
                other in the passes themselves.
        """
        outcome = catch_shortage(lambda: self._passes(batches, visit))
        short = isinstance(outcome, MemoryShortage)
        if self.repeatable:
            short = any(flag for (flag,) in self.world.gather_floats([float(short)]))
        if short:
            raise torch.OutOfMemoryError(
                outcome.detail if isinstance(outcome, MemoryShortage) else "out of memory on another rank"
            )

    def _passes(self, batches: Iterable[GlobalBatch], visit: Callable[[nn.Module, MicroBatch], None]) -> None:
        world, module = self.world, self._strategy.module
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                for batch in batches:
                    for micro in batch.select_for_rank(world.rank, world.size):
                        visit(module, micro)
                        heartbeat.note_progress()
        finally:
            module.train(training)


class TaskModule(Protocol):
    """The functions of a task's module."""

    def prepare_once(self, recipe: RecipeSchema, cache: Path) -> int:
        """Prepare once what every worker needs: data and converted weights. Returns the number of training examples.

        Raises:
            RequestError: the data or the model does not fit the recipe.
        """

    def build(self, recipe: RecipeSchema, cache: Path) -> Task:
        """Return the task with its data memory-mapped and its model on the CPU in fp32; needs no process group."""


def import_task_module(recipe: RecipeSchema) -> TaskModule:
    """Import and return the module of the recipe's task.

    Raises:
        RequestError: the module of another package cannot be imported, or lacks a function.
    """
    description = f"{recipe.spec.module}, the code of task {recipe.task},"
    try:
        module = import_module(recipe.spec.module)
    except ImportError as error:
        raise RequestError(f"{description} cannot be imported: {error}") from error
    if missing := [name for name in ("build", "prepare_once") if not hasattr(module, name)]:
        raise RequestError(f"{description} lacks {' and '.join(missing)}")
    return cast(TaskModule, module)
