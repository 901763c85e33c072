"""Floating-point operations that training needs, whoever does them and however.

Counted are the matrix products of forward (1x) and backward (2x), on real tokens only: every block on every
token, the head on target tokens, attention over the tokens a position may see. What an implementation does
beyond that (padding, masked attention, logits nobody asked for, recomputation) is not useful work: it lowers
the utilisation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one training step's parts, forward and backward."""

    per_token: float  # in the blocks' weights
    per_target: float  # in the head
    per_seen_token: float  # for one position attending to one other, over all blocks

    def of(self, tokens: float, targets: float, seen: float) -> float:
        """FLOPs of ``tokens``, ``targets`` of them trained on; ``seen`` sums the positions each one sees."""
        return self.per_token * tokens + self.per_target * targets + self.per_seen_token * seen


def llama_flops(directory: Path) -> ModelFlops:
    """Of a model of the Llama family (grouped-query attention, gated MLP), from its ``config.json``."""
    config = json.loads((directory / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    block = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
    return ModelFlops(
        per_token=6.0 * layers * block,
        per_target=6.0 * hidden * config["vocab_size"],
        per_seen_token=12.0 * layers * queries,
    )


def seen_per_token(lengths: Sequence[int]) -> float:
    """Positions that a token sees on average, itself included, in causal documents of these lengths."""
    return sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
