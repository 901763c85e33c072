"""What a family of models is described by, and what families have in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Values = Mapping[str, Any]

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
NO_INTERMEDIATE = tuple(key for key in SIZES if key != "intermediate_size")
LAYER_NORM = {"norm": "layer", "norm_bias": True, "gated": False}
EQUAL_HEADS = {"num_key_value_heads": "ignored", "head_dim": "ignored"}  # transformers ignores them too


class Family(NamedTuple):
    """``names``: what it calls a key of llama's. ``absent``: what a key means that is left out.

    ``fixed``: fields of Architecture that no key sets. ``windowed``: whether block i has the window.
    ``more``: further fields. ``sizes``: the keys that have to be there.
    """

    names: Mapping[str, str] = {}
    absent: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    windowed: Callable[[Values, int], bool] = lambda values, block: values["sliding_window"] is not None
    more: Callable[[Values], dict[str, Any]] = lambda values: {}
    sizes: tuple[str, ...] = SIZES


def experts(values: Values) -> dict[str, Any]:
    """Return the fields of Architecture that say which blocks have experts, and how many."""
    plain = values.get("mlp_only_layers") or []
    step = values.get("decoder_sparse_step") or 1
    blocks = range(values["num_hidden_layers"])
    return {
        "experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "expert_intermediate": values["moe_intermediate_size"],
        "sparse_layers": sum(block not in plain and (block + 1) % step == 0 for block in blocks),
    }
