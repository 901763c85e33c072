"""Supervised fine-tuning: the loss is over assistant turns, or over all tokens of plain text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainwright.data.stream.batch import Batch
from trainwright.data.stream.stream import MicroBatch
from trainwright.engine.task import LossSum
from trainwright.models.linear_losses import Head, compute_top_entropy
from trainwright.models.load import load_tokenizer
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.fields import Section
from trainwright.tasks.language_model import LanguageModelTask, prepare_data, prepare_once
from trainwright.tasks.sft.spec import SftSection

__all__ = ["SupervisedFineTuning", "build", "prepare_once"]


def build(recipe: RecipeSchema, cache: Path) -> SupervisedFineTuning:
    """Return the task of a resolved recipe; its data is in the cache, where ``prepare_once`` has put it."""
    tokenizer = load_tokenizer(recipe.model)
    return SupervisedFineTuning(recipe, tokenizer, prepare_data(recipe, tokenizer, cache))


def dft(losses: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of the losses of a batch's targets [N], each weighted by the probability p of its target.

    Dynamic fine-tuning (arXiv 2508.05629, equation 9): -p log p with p as a constant.
    """
    return (losses.detach().neg().exp() * losses).sum()


def compute_eaft_weights(head: Head, section: SftSection) -> torch.Tensor:
    """Return the weight of each target's loss [N]: the entropy of the most probable tokens, divided, to a power.

    Entropy-adaptive fine-tuning (arXiv 2601.02151), with which a token that the model is sure of changes
    little.
    """
    return (compute_top_entropy(head, section.eaft_top) / section.eaft_divisor).pow(section.eaft_power)


class SupervisedFineTuning(LanguageModelTask):
    """Fine-tuning of a causal language model on conversations or text."""

    def _choose_label_smoothing(self) -> float:
        section = self._recipe.own(Section)  # of another kind in a task that builds on this one
        return section.label_smoothing if isinstance(section, SftSection) else 0.0

    def loss(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> LossSum:
        """Return the summed loss of one micro-batch and the weight of its targets."""
        batch, section = self._batch(self._prepared.train, micro, device), self._recipe.own(SftSection)
        if section.loss == "eaft":
            total = module(batch, weights=functools.partial(compute_eaft_weights, section=section))
        else:
            total = module(batch, objective=dft if section.loss == "dft" else None)
        return LossSum(total, float(len(batch.targets)))

    def statistics(self, module: nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
        """Return ``[summed loss in nats, correct predictions, targets]``."""
        assert self._prepared.validation is not None
        batch = self._batch(self._prepared.validation, micro, device)
        sums = module(batch, statistics=True)
        return torch.cat([sums, sums.new_full((1,), len(batch.targets))]) * float(micro.weight > 0)

    def metrics(self, statistics: Sequence[float]) -> dict[str, float]:
        """Return the metrics from statistics summed over the split or step."""
        loss, correct, targets = statistics
        mean = torch.tensor(loss / targets, dtype=torch.float64)
        return {"loss": loss / targets, "perplexity": float(mean.exp()), "token_accuracy": correct / targets}
