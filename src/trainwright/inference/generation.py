"""Answers of a model to a batch of prompts, token by token over its key-value cache.

A loop of our own, as the libraries' draws from one global random state and keeps answers in the batch that have
ended: here what is drawn belongs to the example, and a row leaves the batch, and the cache, with its last token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import RequestError
from trainwright.inference.sampling import Chooser, Sampling
from trainwright.inference.stopping import Stop

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Under which of these names an architecture takes its cache.
_CACHE_NAMES = ("past_key_values", "cache_params")
# Told every token as it is written: the row of the batch, and the token.
OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Answer:
    """What the model wrote, without what it stopped with; ``complete`` where it stopped by itself."""

    text: str
    tokens: tuple[int, ...]
    complete: bool


def answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop: Stop,
    *,
    examples: Sequence[int] | None = None,
    on_token: OnToken | None = None,
) -> list[Answer]:
    """Answer every prompt (its token ids), all of them at once.

    Greedy answers do not depend on what else is in the batch, but for tokens whose logits are equal to the last digits.

    Args:
        model: in evaluation mode, on its device.
        examples: numbers that seed what is drawn for each prompt; 0, 1, … by default.

    Raises:
        RequestError: a prompt is empty, or leaves the model no position to answer in; or the architecture has a cache
            that is not known here.
    """
    rows = [_Row(number, room(model, prompt, sampling)) for number, prompt in enumerate(prompts)]
    choose = Chooser(sampling, range(len(prompts)) if examples is None else examples)
    with torch.no_grad():
        _write(model, tokenizer, prompts, rows, choose, stop, on_token)
    return [row.answer(tokenizer, stop) for row in rows]


def room(model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling) -> int:
    """How many tokens an answer to ``prompt`` can have. Raises RequestError where it is none."""
    if not prompt:
        raise RequestError("the prompt is empty")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    left = sampling.max_new_tokens if positions is None else min(sampling.max_new_tokens, positions - len(prompt))
    if left < 1:
        raise RequestError(f"the prompt has {len(prompt):,} tokens and the model {positions:,} positions; shorten it")
    return left


class _Row:
    """One answer while it is written."""

    def __init__(self, number: int, limit: int) -> None:
        self.number = number
        self._limit = limit
        self._tokens: list[int] = []
        self._complete = False

    def add(self, token: int, tokenizer: PreTrainedTokenizerBase, stop: Stop) -> bool:
        """Take the next token; whether the answer goes on."""
        if token in stop.tokens:
            self._complete = True
            return False
        self._tokens.append(token)
        self._complete = stop.ended(tokenizer, self._tokens)
        return not self._complete and len(self._tokens) < self._limit

    def answer(self, tokenizer: PreTrainedTokenizerBase, stop: Stop) -> Answer:
        text = stop.before(str(tokenizer.decode(self._tokens, skip_special_tokens=True)))
        return Answer(text, tuple(self._tokens), self._complete)


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    rows: list[_Row],
    choose: Chooser,
    stop: Stop,
    on_token: OnToken | None,
) -> None:
    takes = inspect.signature(model.forward).parameters
    cache = _new_cache(model)
    inputs, mask = _left_padded(prompts, tokenizer.pad_token_id or 0, model.device)
    positions = (mask.cumsum(1) - 1).clamp_(min=0)
    step = 0
    while rows:
        extra: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1, **dict.fromkeys(_CACHE_NAMES, cache)}
        extra = {name: value for name, value in extra.items() if name in takes}
        if "past_key_values" in takes or not step:  # states that are not keys know no positions to be masked
            extra["attention_mask"] = mask
        output = model(input_ids=inputs, use_cache=True, **extra)
        tokens = choose(output.logits[:, -1].float(), step, [row.number for row in rows])
        chosen = tokens.tolist()
        if on_token is not None:
            for row, token in zip(rows, chosen, strict=True):
                if token not in stop.tokens:
                    on_token(row.number, token)
        going = [i for i, row in enumerate(rows) if row.add(chosen[i], tokenizer, stop)]
        if going and len(going) < len(rows):
            kept = torch.tensor(going, device=tokens.device)
            cache.reorder_cache(kept)
            tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
        rows = [rows[i] for i in going]
        inputs = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = positions[:, -1:] + 1
        step += 1


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [B, L], every prompt ending in the last column."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _new_cache(model: PreTrainedModel) -> Any:
    from transformers import DynamicCache

    if not any(name in inspect.signature(model.forward).parameters for name in _CACHE_NAMES):
        raise RequestError(f"{type(model).__name__} keeps its past in a way of its own, which is not known here")
    return DynamicCache(config=model.config)
