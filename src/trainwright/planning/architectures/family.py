"""The description of a model family, and properties that families share. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
NO_INTERMEDIATE = tuple(key for key in SIZES if key != "intermediate_size")
LAYER_NORM = {"norm": "layer", "norm_bias": True, "gated": False}
EQUAL_HEADS = {"num_key_value_heads": "ignored", "head_dim": "ignored"}  # transformers also ignores them


class Family(NamedTuple):
    """How a family's configuration maps to an architecture.

    ``names``: its names of llama's keys. ``absent``: values of missing keys. ``fixed``: fields of Architecture that no
    key sets. ``windowed``: whether block i has the window. ``more``: further fields. ``sizes``: required keys.
    """

    names: Mapping[str, str] = {}
    absent: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    windowed: Callable[[Values, int], bool] = lambda values, block: values["sliding_window"] is not None
    more: Callable[[Values], dict[str, Any]] = lambda values: {}
    sizes: tuple[str, ...] = SIZES


def experts(values: Values) -> dict[str, Any]:
    """Return the fields of Architecture for the number of experts and of blocks that have them."""
    plain = values.get("mlp_only_layers") or []
    step = values.get("decoder_sparse_step") or 1
    blocks = range(values["num_hidden_layers"])
    return {
        "experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "expert_intermediate": values["moe_intermediate_size"],
        "sparse_layers": sum(block not in plain and (block + 1) % step == 0 for block in blocks),
    }
