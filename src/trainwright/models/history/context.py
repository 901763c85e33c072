"""The context of a trained model that acts over steps and episodes, in constant memory.

A cache holds the keys and values of the context's tokens. When the context is full, it drops several steps at once and
recomputes the rest: keys depend on earlier tokens, so a cache without only the oldest tokens would differ from the
contexts seen in training.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from trainwright.models.history.model import HistoryModel, HistoryShape, KeyValueCache, Steps


class Context:
    """The contexts of ``count`` parallel copies of a model.

    Args:
        moves_by: steps to drop at once when a context is full; best a number of whole episodes.
        cached: False recomputes the whole context in every step, for measurements and tests.
    """

    def __init__(self, shape: HistoryShape, count: int, *, moves_by: int, cached: bool = True) -> None:
        assert 1 <= moves_by <= shape.steps
        self._shape = shape
        self._count = count
        self._moves_by = moves_by
        self._cache = KeyValueCache(shape.tokens) if cached else None
        self._steps: Steps | None = None  # steps in the context; in a compressed one, those of this region
        self._before: torch.Tensor | None = None  # tokens before them
        self._begun = False

    @property
    def held(self) -> int:
        """Return the number of steps in the context; in a compressed one, of this region."""
        return 0 if self._steps is None else self._steps.length

    @property
    def cache_tokens(self) -> int:
        """Return the number of tokens allocated in the cache, which is constant."""
        return 0 if self._cache is None else self._cache.free_positions

    def logits(self, model: HistoryModel, step: Steps) -> torch.Tensor:
        """Return the logits of actions [count, actions] after one more step [count, 1]."""
        if not self._begun:
            self._begun = True
            self._begin(model)
        elif self.held == self._shape.steps:
            self._move_on(model)
        self._steps = step if self._steps is None else _joined(self._steps, step)
        if self._cache is not None:
            hidden = model.decoded(model.tokens(step), self._cache)
        else:
            hidden = model.decoded(self._tokens(model))
        logits: torch.Tensor = model.act(hidden[:, -1])
        return logits

    def _begin(self, model: HistoryModel) -> None:
        if self._shape.latents:
            self._place(model, model.first_memory(self._count), None)
        elif self._shape.regions == 2:
            self._place(model, self._between_marks(model, model.no_region(self._count)), None)

    def _move_on(self, model: HistoryModel) -> None:
        """Free space in a full context."""
        assert self._steps is not None
        shape = self._shape
        if shape.latents:
            asked = model.memory_questions(self._count)
            if self._cache is not None:
                hidden = model.decoded(asked, self._cache)
            else:
                hidden = model.decoded(torch.cat([self._tokens(model), asked], 1))
            self._place(model, model.remembered(hidden[:, -shape.latents :]), None)
        elif shape.regions == 2:
            region = model.tokens(self._steps.without_past(shape.actions))
            self._place(model, self._between_marks(model, region), None)
        else:
            kept = self._steps.part(self._moves_by, shape.steps)
            self._place(model, None, kept.without_past(shape.actions) if kept.length else None)

    def _between_marks(self, model: HistoryModel, region: torch.Tensor) -> torch.Tensor:
        opens, closes = (model.mark(self._count, closes=closes) for closes in (False, True))
        return torch.cat([opens, region, closes], 1)

    def _place(self, model: HistoryModel, before: torch.Tensor | None, steps: Steps | None) -> None:
        self._before, self._steps = before, steps
        if self._cache is None:
            return
        self._cache.clear()
        if before is not None or steps is not None:
            model.decoded(self._tokens(model), self._cache)

    def _tokens(self, model: HistoryModel) -> torch.Tensor:
        """Return all tokens of the context."""
        parts = [] if self._before is None else [self._before]
        if self._steps is not None:
            parts.append(model.tokens(self._steps))
        return torch.cat(parts, 1)


def _joined(first: Steps, second: Steps) -> Steps:
    return Steps(*(torch.cat([getattr(first, f.name), getattr(second, f.name)], 1) for f in fields(Steps)))
