"""The training objective of history models: the learner's action at every step, and optional outcomes.

Strategies wrap ``forward`` of modules, so losses are computed inside it, and acting calls it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.data.stream.batch import copy_to_device
from trainwright.tasks.algorithm_distillation.model import HistoryModel, Steps

# The sums that ``forward`` returns, in order. ``total`` is minimized.
SUMS = ("total", "action_loss", "correct", "actions", "reward_loss", "state_loss", "mark_loss", "marks_right", "marks")


@dataclass(frozen=True)
class HistoryBatch:
    """Windows of n histories, t steps long; with compressed contexts the last region may be shorter."""

    steps: Steps
    actions: torch.Tensor  # int64 [n, t]
    rewards: torch.Tensor  # float32 [n, t]
    next_states: torch.Tensor  # int64 [n, t, k]
    real: torch.Tensor  # bool [n, t]; False for padding
    targets: torch.Tensor  # bool [n, t]; always on the host, which never waits for it

    def to(self, device: torch.device) -> HistoryBatch:
        """Return the same batch on ``device``, except for its targets."""
        tensors: dict[str, Any] = {
            field.name: copy_to_device(getattr(self, field.name), device)
            for field in fields(self)
            if field.name not in ("steps", "targets")
        }
        steps = Steps(*(copy_to_device(getattr(self.steps, field.name), device) for field in fields(Steps)))
        return replace(self, steps=steps, **tensors)

    def select_at_targets(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the elements of tensors [n, t, ...] at the targets, [targets, ...]."""
        indices = copy_to_device(self.targets.flatten().nonzero().flatten(), self.actions.device)
        return tuple(value.flatten(0, 1).index_select(0, indices) for value in values)


@dataclass(frozen=True)
class LossWeights:
    """Weights of the parts of the loss relative to actions, and the label smoothing of actions."""

    label_smoothing: float = 0.0
    reward: float = 0.0
    next_state: float = 0.0
    mark: float = 0.0


class HistoryObjective(nn.Module):
    """``forward(batch)`` returns ``SUMS`` over the batch (fp32); ``forward(use=f)`` returns ``f(model)``."""

    def __init__(self, model: HistoryModel, weights: LossWeights) -> None:
        super().__init__()
        self.model = model
        self.weights = weights

    def forward(
        self, batch: HistoryBatch | None = None, *, use: Callable[[HistoryModel], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the sums of a batch's losses, or the result of ``use(model)``."""
        if use is not None:
            return use(self.model)
        assert batch is not None
        parts = [self._sums(part, hidden) for part, hidden in self._compute_hidden(batch)]
        return torch.stack(parts).sum(0)

    def blocks(self) -> list[nn.Module]:
        """Return the units of compilation, recomputation and sharding."""
        return list(self.model.blocks)

    def _compute_hidden(self, batch: HistoryBatch) -> Iterator[tuple[HistoryBatch, torch.Tensor]]:
        """Yield batch parts with hidden states [n, t, width] that predict actions, one per region with latents."""
        model, shape = self.model, self.model.shape
        if shape.latents:
            yield from self._iterate_with_memory(batch)
        elif shape.regions == 2:
            yield batch, self._compute_hidden_after_region(batch)
        else:
            yield batch, model.select_at_steps(model.decode_tokens(model.tokens(batch.steps)))

    def _compute_hidden_after_region(self, batch: HistoryBatch) -> torch.Tensor:
        model, every = self.model, self.model.shape.tokens_per_step
        count, length = len(batch.actions), model.shape.steps * every
        tokens = model.tokens(batch.steps)
        is_there = batch.real[:, :1, None]
        before = torch.where(is_there, tokens[:, :length], model.build_missing_region(count))
        opens, closes = model.mark(count, closes=False), model.mark(count, closes=True)
        hidden = model.decode_tokens(torch.cat([opens, before, closes, tokens[:, length:]], 1))
        return model.select_at_steps(torch.cat([hidden[:, 1 : 1 + length], hidden[:, 2 + length :]], 1))

    def _iterate_with_memory(self, batch: HistoryBatch) -> Iterator[tuple[HistoryBatch, torch.Tensor]]:
        """Process the regions in order, with latents of the previous ones, through which gradients flow."""
        model, shape = self.model, self.model.shape
        count, latents = len(batch.actions), shape.latents
        memory = model.build_first_memory(count)
        for begin in range(0, batch.steps.length, shape.steps):
            part = _select_part(batch, begin, begin + shape.steps)
            queries = [] if begin + shape.steps >= batch.steps.length else [model.build_memory_questions(count)]
            tokens = model.tokens(part.steps)
            hidden = model.decode_tokens(torch.cat([memory, tokens, *queries], 1))
            if queries:
                memory = model.compute_memory(hidden[:, -latents:])
            yield part, model.select_at_steps(hidden[:, latents : latents + tokens.shape[1]])

    def _sums(self, batch: HistoryBatch, hidden: torch.Tensor) -> torch.Tensor:
        model, weights = self.model, self.weights
        target_hidden, actions, rewards, next_states = batch.select_at_targets(
            hidden, batch.actions, batch.rewards, batch.next_states
        )
        logits = model.act(target_hidden).float()
        action_loss = F.cross_entropy(logits, actions, label_smoothing=weights.label_smoothing, reduction="sum")
        correct = (logits.argmax(-1) == actions).sum()
        zero = action_loss.new_zeros(())
        reward_loss, state_loss = zero, zero
        if model.outcome is not None:
            outcome = model.outcomes(target_hidden, actions)
            if model.reward_head is not None:
                reward_loss = (model.reward_head(outcome)[:, 0].float() - rewards).square().sum()
            if model.state_heads is not None:
                state_loss = self._state_loss(outcome, next_states)
        mark_loss, marks_right, marks = self._mark_sums(batch, hidden) if model.mark_head is not None else (zero,) * 3
        total = action_loss + weights.reward * reward_loss + weights.next_state * state_loss + weights.mark * mark_loss
        counts = [correct, actions.new_full((), len(actions)), reward_loss, state_loss, mark_loss, marks_right, marks]
        return torch.stack([total, action_loss, *(value.to(total.dtype) for value in counts)])

    def _state_loss(self, outcome: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        assert self.model.state_heads is not None
        losses = [
            F.cross_entropy(head(outcome).float(), states[:, i], reduction="sum")
            for i, head in enumerate(self.model.state_heads)
        ]
        return torch.stack(losses).sum()

    def _mark_sums(self, batch: HistoryBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return loss, correct predictions and number of targets for whether a region ends at each target."""
        assert self.model.mark_head is not None
        steps = self.model.shape.steps
        closes = (torch.arange(batch.steps.length, device=hidden.device) % steps == steps - 1).long()
        labels, target_hidden = batch.select_at_targets(closes.expand(len(hidden), -1), hidden)
        logits = self.model.mark_head(target_hidden).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, (logits.argmax(-1) == labels).sum(), labels.new_full((), len(labels))


def _select_part(batch: HistoryBatch, begin: int, end: int) -> HistoryBatch:
    arrays = {f.name: getattr(batch, f.name)[:, begin:end] for f in fields(batch) if f.name != "steps"}
    return replace(batch, steps=batch.steps.part(begin, end), **arrays)
