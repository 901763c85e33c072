"""The focal loss as a task, a forget loss, an optimizer and an attention kernel."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.data.stream.stream import MicroBatch
from trainwright.engine.task import LossSum
from trainwright.models.attention.sequences import Call, Sequences
from trainwright.models.load import load_tokenizer
from trainwright.recipe.schema import OptimizerSection, RecipeSchema
from trainwright.tasks.language_model import prepare_data, prepare_once
from trainwright.tasks.sft.task import SupervisedFineTuning
from trainwright_example import FocalSection

__all__ = ["Focal", "attention_by_hand", "bounded_ascent", "build", "prepare_once"]


def build(recipe: RecipeSchema, cache: Path) -> Focal:
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


def attention_by_hand(call: Call, sequences: Sequences | None) -> torch.Tensor:
    """Return the causal attention within each sequence, [1, T, H, V]."""
    heads = call.query.shape[1] // call.key.shape[1]
    key, value = call.key.repeat_interleave(heads, 1), call.value.repeat_interleave(heads, 1)
    outputs, boundaries = [], call.boundaries.tolist()
    for begin, end in pairwise(boundaries):
        scores = call.query[:, :, begin:end] @ key[:, :, begin:end].mT * call.scale
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ value[:, :, begin:end])
    return torch.cat(outputs, 2).transpose(1, 2)
