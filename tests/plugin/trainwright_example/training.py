"""The focal loss as a task, and a forget loss."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.data.stream.stream import MicroBatch
from trainwright.engine.task import LossSum
from trainwright.models.load import load_tokenizer
from trainwright.recipe.schema import OptimizerSection, Recipe
from trainwright.tasks.language_model import prepare_data, prepare_once
from trainwright.tasks.sft.task import SupervisedFineTuning
from trainwright_example import FocalSection

__all__ = ["Focal", "bounded_ascent", "build", "prepare_once"]


def build(recipe: Recipe, cache: Path) -> Focal:
    """Build the task of a resolved recipe."""
    tokenizer = load_tokenizer(recipe.model)
    return Focal(recipe, tokenizer, prepare_data(recipe, tokenizer, cache))


class Focal(SupervisedFineTuning):
    """Fine-tuning where tokens that are predicted well count less."""

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the sum over targets of (1 - p)^gamma * -log p."""
        batch, gamma = self._batch(self._prepared.train, micro, device), self._recipe.own(FocalSection).gamma

        def focal(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
            return ((1 - (-losses).exp()) ** gamma * losses).sum()

        return LossSum(module(batch, objective=focal), float(len(batch.targets)))


def bounded_ascent(losses: torch.Tensor, beta: float) -> torch.Tensor:
    """Return log p of every forget token, and -beta where it is below that."""
    return -losses.clamp(max=beta)


def sgd(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Return torch's SGD. ``section.options`` may have ``nesterov``."""
    parameters = [parameter for _, parameter in named]
    decay = section.weight_decay
    return torch.optim.SGD(parameters, section.learning_rate, section.momentum, weight_decay=decay, **section.options)
