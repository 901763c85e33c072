"""Language models as a user writes them, for ``model.implementation``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + self.mlp(x)


class Logits(nn.Module):
    """Returns logits; its head is tied to the embedding, and a buffer is not saved."""

    positions: torch.Tensor

    def __init__(self, vocab_size: int, hidden: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        table = torch.sin(torch.arange(1024)[:, None] / 10 ** torch.linspace(0, 3, hidden))
        self.register_buffer("positions", 0.1 * table, persistent=False)

    def hidden(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embedding(ids) + (self.positions[: ids.shape[1]] if places is None else self.positions[places])
        for block in self.blocks:
            x = block(x, mask)
        return x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.hidden(input_ids))
        return logits


class Hidden(Logits):
    """The same model, which returns what its head takes."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.hidden(input_ids)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Packs(Hidden):
    """The same model, which keeps the sequences of a pack apart."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if cu_seq_lens_q is None:
            return self.hidden(input_ids)
        places = torch.arange(input_ids.shape[1])
        text = torch.bucketize(places, cu_seq_lens_q, right=True)
        return self.hidden(input_ids, (text[:, None] == text) & (places[:, None] >= places), position_ids)


class NoBlocks(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.embedding(input_ids)
        return logits
