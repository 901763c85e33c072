"""Generate answers to a batch of prompts, token by token with a key-value cache.

Not the generation loop of transformers, which draws from one global random state and keeps finished answers in the
batch: here the random numbers depend on the example only, and a finished row leaves the batch and the cache.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from trainwright.errors import RequestError
from trainwright.models.tokenization import list_token_ids, turn_end
from trainwright.recipe.sections.model import OWN
from trainwright.utils import heartbeat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Arguments under which architectures take a cache: from transformers 5.24 on, before, and in recurrent models.
_CACHES = ("cache", "past_key_values", "cache_params")
# Called with every generated token: the row in the batch, and the token.
OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Answer:
    """The model's answer without its stop; ``complete``: whether the model stopped by itself."""

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
    """Answer all prompts (token ids) in one batch.

    Greedy answers do not depend on the other prompts in the batch, except for ties within rounding errors.

    Args:
        model: in evaluation mode, on its device.
        examples: numbers that seed the sampling for each prompt; 0, 1, … by default.

    Raises:
        RequestError: a prompt is empty, or leaves no position for an answer; or the architecture's cache is not
            supported.
    """
    rows = [_Row(number, compute_new_token_limit(model, prompt, sampling)) for number, prompt in enumerate(prompts)]
    choose = Sampler(sampling, range(len(prompts)) if examples is None else examples)
    with torch.no_grad():
        _write(model, tokenizer, prompts, rows, choose, stop, on_token)
    return [row.answer(tokenizer, stop) for row in rows]


def compute_new_token_limit(model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling) -> int:
    """Return the maximum number of tokens of an answer to ``prompt``. Raises RequestError if it is 0."""
    if not prompt:
        raise RequestError("the prompt is empty")
    embeddings = model.config.get_text_config().vocab_size
    if max(prompt) >= embeddings:
        raise RequestError(
            f"the prompt has the token {max(prompt):,} of the tokenizer, but the model has only {embeddings:,} "
            "embeddings; use the tokenizer of the model"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = sampling.max_new_tokens if positions is None else min(sampling.max_new_tokens, positions - len(prompt))
    if limit < 1:
        raise RequestError(
            f"the prompt has {len(prompt):,} tokens, but the model has {positions:,} positions; shorten it"
        )
    return limit


class _Row:
    """One answer in progress."""

    def __init__(self, number: int, limit: int) -> None:
        self.number = number
        self._limit = limit
        self._tokens: list[int] = []
        self._complete = False

    def add(self, token: int, tokenizer: PreTrainedTokenizerBase, stop: Stop) -> bool:
        """Add the next token; return whether the answer continues."""
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
    choose: Sampler,
    stop: Stop,
    on_token: OnToken | None,
) -> None:
    takes = inspect.signature(model.forward).parameters
    cache_name, cache = _create_cache(model)
    config = model.config.get_text_config()
    attends = hasattr(config, "num_attention_heads")
    inputs, mask = _pad_left(prompts, choose_padding_token(tokenizer, config.vocab_size), model.device)
    positions = (mask.cumsum(1) - 1).clamp_(min=0)
    step = 0
    while rows:
        extra: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1, cache_name: cache}
        extra = {name: value for name, value in extra.items() if name in takes}
        if attends or cache is None or not step:  # recurrent states have no positions to mask
            extra["attention_mask"] = mask
        output = model(input_ids=inputs, use_cache=True, **extra)
        tokens = choose(output.logits[:, -1].float(), step, [row.number for row in rows])
        next_ids = tokens.tolist()
        heartbeat.note_progress()
        if on_token is not None:
            for row, token in zip(rows, next_ids, strict=True):
                if token not in stop.tokens:
                    on_token(row.number, token)
        going = [i for i, row in enumerate(rows) if row.add(next_ids[i], tokenizer, stop)]
        if going and len(going) < len(rows):
            indices = torch.tensor(going, device=tokens.device)
            if cache is not None:
                cache.reorder_cache(indices)
            inputs, tokens, mask, positions = inputs[indices], tokens[indices], mask[indices], positions[indices]
        rows = [rows[i] for i in going]
        inputs = tokens[:, None] if cache is not None else torch.cat([inputs, tokens[:, None]], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        positions = positions[:, -1:] + 1
        step += 1


def choose_padding_token(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> int:
    """Return the padding token or, if the model has no embedding for it, 0; padding is masked."""
    pad: int | None = tokenizer.pad_token_id
    return pad if pad is not None and pad < embeddings else 0


def _pad_left(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask [B, L], with every prompt ending in the last column."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Attributes:
        max_new_tokens: the maximum length of an answer, in tokens.
        temperature: divides the logits before a token is drawn; 0 takes the most probable one.
        top_p: draw from the smallest set of most probable tokens with this total probability (arXiv 1904.09751).
        top_k: draw from this number of most probable tokens.
        seed: determines all draws for an example together with its number, whatever the batch, rank or device.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0


class Sampler:
    """Choose the next token of every row of a batch.

    Args:
        examples: the number of each row's example.
    """

    def __init__(self, sampling: Sampling, examples: Sequence[int]) -> None:
        self._sampling = sampling
        self._draws: torch.Tensor | None = None
        if sampling.temperature > 0:
            self._draws = torch.stack([_sample_uniforms(sampling, example) for example in examples])

    def __call__(self, logits: torch.Tensor, step: int, rows: Sequence[int]) -> torch.Tensor:
        """Return tokens [B] for ``logits`` [B, V] of the unfinished ``rows``, at the ``step``-th token from 0."""
        if self._draws is None:
            return logits.argmax(-1)
        draws = self._draws[list(rows), step].to(logits.device)
        logits = logits.double() / self._sampling.temperature
        if self._sampling.top_p >= 1 and self._sampling.top_k is None:
            return _sample_tokens(logits.softmax(-1), draws)
        sorted_logits, tokens = logits.sort(dim=-1, descending=True, stable=True)
        if self._sampling.top_k is not None:
            sorted_logits, tokens = sorted_logits[:, : self._sampling.top_k], tokens[:, : self._sampling.top_k]
        probabilities = sorted_logits.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        nucleus = probabilities.masked_fill(before >= self._sampling.top_p, 0.0)
        return tokens.gather(1, _sample_tokens(nucleus, draws)[:, None])[:, 0]


def _sample_tokens(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the indices [B] drawn from the ``weights`` [B, V] by inverse transform of the ``draws`` in [0, 1)."""
    ends = weights.cumsum(-1)
    index = torch.searchsorted(ends, draws[:, None] * ends[:, -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1)[:, 0]


def _sample_uniforms(sampling: Sampling, example: int) -> torch.Tensor:
    """Return a uniform number in [0, 1) for every token of the example's answer."""
    digest = hashlib.sha256(f"{sampling.seed}/{example}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Stop:
    """What ends an answer, without being part of it.

    Attributes:
        tokens: ids, any of which ends it.
        texts: texts, any of which ends it before its start.
    """

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()

    def add_texts(self, texts: Iterable[str]) -> Stop:
        """Return a copy with additional stop texts."""
        return Stop(self.tokens, (*self.texts, *(text for text in texts if text)))

    def before(self, text: str) -> str:
        """Return the part of ``text`` before the first stop text."""
        positions = [position for stop in self.texts if (position := text.find(stop)) >= 0]
        return text[: min(positions)] if positions else text

    def ended(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
        """Return whether the last token of ``ids`` has completed a stop text."""
        if not self.texts:
            return False
        # A token may be less than a character, so take as many as the text has bytes, and some for invisible ones.
        tail = str(tokenizer.decode(list(ids[-(max(len(text.encode()) for text in self.texts) + 8) :])))
        return any(text in tail for text in self.texts)


def stop_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> Stop:
    """Return the model's own stop.

    Args:
        chat: whether answers are turns of a conversation: then the end of a turn in the chat template ends them, too.
    """
    tokens = {*list_token_ids(tokenizer.eos_token_id), *list_token_ids(getattr(model.config, "eos_token_id", None))}
    if model.generation_config is not None:
        tokens.update(list_token_ids(model.generation_config.eos_token_id))
    texts: tuple[str, ...] = ()
    if chat:
        token, text = turn_end(tokenizer)
        tokens.update(list_token_ids(token))
        texts = (text,) if text else ()
    return Stop(frozenset(tokens), texts)


def _create_cache(model: PreTrainedModel) -> tuple[str, Any]:
    """Return the name of the argument under which the model takes its cache, and an empty one; None as the cache of a
    model without one, which computes the whole text for every token.

    Raises:
        RequestError: the architecture's cache is not supported.
    """
    if model.config.model_type == OWN:
        return "", None
    arguments = inspect.signature(model.forward).parameters
    for name in _CACHES:
        if name in arguments and "dict" not in str(arguments[name].annotation):  # a table that XLM calls its cache
            return name, DynamicCache(config=model.config)
    raise RequestError(f"{type(model).__name__} has an unsupported kind of cache")
