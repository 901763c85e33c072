"""What the engine asks of a kind of training. A task knows nothing of ranks, strategies or accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from trainwright.data.stream.stream import GlobalBatch, MicroBatch, Stream
from trainwright.models.files.weights import Weights
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import World


@dataclass(frozen=True)
class LossSum:
    """The sum of the per-target losses of a micro-batch, and the sum of the targets' weights.

    The engine divides by the weight of the whole global batch, over all ranks and micro-batches. ``statistics``: sums
    beside, as of a micro-batch that is evaluated, for metrics of the step.
    """

    total: torch.Tensor
    weight: float
    statistics: torch.Tensor | None = None


class Task(Protocol):
    """A model, the stream of its examples, and how they meet."""

    module: nn.Module
    weights: Weights | None  # what fills the module where its parameters are on the meta device; None: it is whole
    stream: Stream
    validation: Stream | None
    prompts: Sequence[str]
    answers: bool  # whether an evaluation has metrics of the model's answers
    start: str | None  # fingerprint of the weights of the start, known once begun; None: no loss asks for them later
    base: str | None  # fingerprint of the frozen weights that an adapter is trained on; None: all weights are trained

    state: dict[str, float]  # numbers of the task's own that training changes; they are kept in checkpoints

    def blocks(self) -> list[nn.Module]:
        """Return the repeated units of the module, in order."""

    def begin(self, strategy: Strategy, notify: Callable[[str], None]) -> None:
        """Start the task; called once on every rank, with the initial weights distributed and no checkpoint loaded yet.

        Args:
            notify: shows a line to the user; only rank 0's are seen.
        """

    def before_passes(self, strategy: Strategy, batch: GlobalBatch, *, validation: bool) -> None:
        """Prepare for the passes over a global batch; called on every rank, for what a loss needs to know of the whole
        batch.

        Args:
            validation: whether the batch is of the validation stream.
        """

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Losses of one micro-batch of the stream."""

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return a vector of sums over one micro-batch of the validation stream; 0 where its weight is 0."""

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Metrics of the validation split or a step, from statistics summed over it; `loss` is lower when better."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Follow an update of the weights; called on every rank with the metrics of the step."""

    def answer_metrics(self, module: nn.Module, world: World, *, together: bool) -> dict[str, float]:
        """Metrics of the model's answers to validation rows, where ``answers`` says so. Every rank calls this.

        Args:
            module: whole, for generation.
            together: every rank answers everything, as each pass of the module takes all of them.
        """

    def generate(self, module: nn.Module, prompt: str) -> str:
        """Return what the model answers to a prompt, greedily."""

    def describe(self) -> dict[str, Any]:
        """Fields of the `start` event that only the task knows."""

    def describe_example(self, index: int) -> str:
        """Return an example of the stream in few words, for error messages."""

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
        """Write the model for use outside, from its full parameters and buffers by name; an adapter, from its own.

        Raises:
            TrainingError: something is missing, or it is not read as it was written.
        """

    def adds_nothing(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether an adapter with these parts of its parameters would leave the model as it is."""

    def read_back(self, module: nn.Module, directory: Path, *, whole: bool) -> None:
        """See that an exported adapter, put on the base again, gives the trained model's logits.

        Args:
            module: as for generation; where it is not ``whole``, all ranks do the same.

        Raises:
            TrainingError: it does not.
        """
