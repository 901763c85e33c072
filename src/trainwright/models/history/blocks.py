"""Transformer blocks over histories, with a key-value cache of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

_BASE = 10_000.0  # base of the rotary wavelengths, arXiv 2104.09864


@dataclass
class KeyValueCache:
    """Keys and values of the context's tokens for every block, with space for ``capacity`` tokens.

    ``append`` writes after the first ``length`` tokens; call ``advance`` after all blocks have appended.
    """

    capacity: int
    length: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def append(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [n, heads, t, size] of the next tokens; return those of all tokens so far."""
        if block == len(self.keys):
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self.keys.append(keys.new_empty(shape))
            self.values.append(values.new_empty(shape))
        begin, end = self.length, self.length + keys.shape[2]
        assert end <= self.capacity, "the context is longer than its cache"
        self.keys[block][:, :, begin:end] = keys
        self.values[block][:, :, begin:end] = values
        return self.keys[block][:, :, :end], self.values[block][:, :, :end]

    @property
    def free_positions(self) -> int:
        """Return the number of allocated tokens, used or not."""
        return max((keys.shape[2] for keys in self.keys), default=0)

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more tokens as cached."""
        self.length += tokens

    def clear(self) -> None:
        """Remove all tokens, and keep the memory."""
        self.length = 0


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, with pre-layer normalization (arXiv 2002.04745).

    Args:
        index: index of the block, also in a cache.
    """

    def __init__(self, index: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.index = index
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor | None = None, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        """Process ``hidden`` [n, t, width], which follows the cached tokens; ``rotation`` [2, t, size] has its
        positions.
        """
        count, tokens, width = hidden.shape
        joint = self.query_key_value(self.attention_norm(hidden))
        query, key, value = joint.view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        causal: bool = tokens > 1
        mask: torch.Tensor | None = None
        if cache is not None:
            before = cache.length
            key, value = cache.append(self.index, key, value)
            if before and causal:
                mask = hidden.new_ones(tokens, before + tokens, dtype=torch.bool).tril(before)
                causal = False
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, dropout_p=dropout)
        mixed = self.output(mixed.transpose(1, 2).reshape(count, tokens, width))
        hidden = hidden + F.dropout(mixed, self.dropout, self.training)
        fed = self.down(F.gelu(self.up(self.feed_forward_norm(hidden)), approximate="tanh"))
        return hidden + F.dropout(fed, self.dropout, self.training)


def rotation_of(positions: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the cosines and sines [2, t, size] of rotary embeddings for ``positions`` [t] (arXiv 2104.09864)."""
    frequencies = _BASE ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotated(vectors: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate ``vectors`` [..., t, size] by their positions."""
    first, second = vectors.chunk(2, -1)
    return vectors * rotation[0] + torch.cat([-second, first], -1) * rotation[1]
