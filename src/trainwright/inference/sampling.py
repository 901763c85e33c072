"""Choose the next token: the most probable one, or a random one that depends on the example only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
            self._draws = torch.stack([_draws(sampling, example) for example in examples])

    def __call__(self, logits: torch.Tensor, step: int, rows: Sequence[int]) -> torch.Tensor:
        """Return tokens [B] for ``logits`` [B, V] of the unfinished ``rows``, at the ``step``-th token from 0."""
        if self._draws is None:
            return logits.argmax(-1)
        draws = self._draws[list(rows), step].to(logits.device)
        logits = logits.double() / self._sampling.temperature
        if self._sampling.top_p >= 1 and self._sampling.top_k is None:
            return _drawn(logits.softmax(-1), draws)
        ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
        if self._sampling.top_k is not None:
            ordered, tokens = ordered[:, : self._sampling.top_k], tokens[:, : self._sampling.top_k]
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        kept = probabilities.masked_fill(before >= self._sampling.top_p, 0.0)
        return tokens.gather(1, _drawn(kept, draws)[:, None])[:, 0]


def _drawn(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return the indices [B] drawn from the ``weights`` [B, V] by inverse transform of the ``draws`` in [0, 1)."""
    ends = weights.cumsum(-1)
    index = torch.searchsorted(ends, draws[:, None] * ends[:, -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1)[:, 0]


def _draws(sampling: Sampling, example: int) -> torch.Tensor:
    """Return a uniform number in [0, 1) for every token of the example's answer."""
    digest = hashlib.sha256(f"{sampling.seed}/{example}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
