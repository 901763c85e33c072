"""A GPT and its training loop as a newcomer writes them in plain torch, after nanoGPT's (karpathy/nanoGPT, MIT).

The same model, initialization, optimizer groups, schedule and way of drawing batches as its train.py with
``--device=cpu --compile=False``: fp32 (or, as it does on a GPU, bf16 by autocast), random windows, AdamW without
fusion, one loss read a step.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.first_norm(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_last = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_last else 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class PlainLoop:
    """Steps of 2,000 by default over a text of tokens ``train``; ``validation`` is measured whole at the end."""

    def __init__(
        self, train: np.ndarray, validation: np.ndarray, vocabulary: int, steps: int, *, bf16: bool = False
    ) -> None:
        self.train, self.validation, self.bf16 = train, validation, bf16
        self.context, self.rows, self.steps = 64, 12, steps
        torch.manual_seed(1337)
        self.model = PlainGPT(vocabulary, self.context, layers=4, heads=4, width=128)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
        self.generator = torch.Generator().manual_seed(1337)
        self.model.train()

    def step(self, number: int) -> float:
        """Step ``number``, counted from 1; its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(number - 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = self.model(*self._batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        data, size = self.train, self.context
        places = torch.randint(len(data) - size, (self.rows,), generator=self.generator)
        ids = torch.stack([torch.from_numpy(data[i : i + size].astype(np.int64)) for i in places])
        targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + size].astype(np.int64)) for i in places])
        return ids, targets

    def _rate(self, done: int) -> float:
        warm, peak, floor = 100, 1e-3, 1e-4
        if done < warm:
            return peak * (done + 1) / (warm + 1)
        ratio = (done - warm) / max(1, self.steps - warm)
        return floor + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - floor)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean over all whole windows of the validation text."""
        self.model.eval()
        whole = (len(self.validation) - 1) // self.context * self.context
        ids = torch.from_numpy(self.validation[:whole].astype(np.int64)).view(-1, self.context)
        targets = torch.from_numpy(self.validation[1 : whole + 1].astype(np.int64)).view(-1, self.context)
        losses = [
            self.model(ids[i : i + 64], targets[i : i + 64]) * len(ids[i : i + 64]) for i in range(0, len(ids), 64)
        ]
        return float(sum(losses)) / len(ids)
