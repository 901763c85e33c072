"""What of a recipe for unlearning a plan has to know: what is trained, and what runs beside it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainwright.planning.architecture import Architecture
from trainwright.planning.memory_inventory import OUTSIDE, Weight, inventory
from trainwright.planning.workload import Beside

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

# What the parameters of most families are called, by what they do.
_IN_BLOCKS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_key_value": "self_attn.qkv_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}


def beside(recipe: Recipe, architecture: Architecture) -> Beside | None:
    """What computes beside the model in every step; None where nothing does."""
    section = recipe.unlearn
    if section is None or not section.compares:
        return None
    adapted = recipe.model.adapter.type != "none"
    other = section.reference not in ("start", "base")
    if not section.needs_reference_model:
        # It is asked once, before the first step; another model stays in memory all the same.
        return Beside(architecture.layers, 0.0, True) if other else None
    last = section.last_block
    whole = section.facts.reference == "logits" and section.retains and section.value("retain_loss") != "nll"
    blocks = architecture.layers if last is None else min(last + 1, architecture.layers)
    return Beside(blocks, 1.0 if whole else 0.5, other or not adapted)


def documents(recipe: Recipe) -> int:
    """How many rows are an example: a forget row, its refusal and a retain row, as far as they are trained on."""
    section = recipe.unlearn
    return 1 if section is None else 1 + section.retains + (section.objective == "dpo")


def trained(recipe: Recipe, architecture: Architecture, assumptions: list[str]) -> frozenset[tuple[int, str]] | None:
    """The parameters that are trained, ``(unit, name)`` as in an inventory; None: all, or an adapter's."""
    section = recipe.unlearn
    if section is None or recipe.model.adapter.type != "none":
        return None
    last = section.last_block
    if last is None and section.trainable is None:
        return None
    weights = inventory(architecture, 4, True).weights
    found = frozenset((w.unit, w.name) for w in weights if _wanted(w, section.trainable, last))
    if not found:
        assumptions.append(
            f"all parameters are trained: what unlearn.trainable matches in a {architecture.family} is not known here"
        )
    return found or None


def _wanted(weight: Weight, patterns: Sequence[str] | None, last: int | None) -> bool:
    if last is not None and (weight.unit > last or weight.name.startswith("head")):
        return False
    return patterns is None or any(re.fullmatch(pattern, name) for name in _names(weight) for pattern in patterns)


def _names(weight: Weight) -> Iterator[str]:
    name, part = weight.name, "weight"
    if name.endswith(".bias"):
        name, part = name.removesuffix(".bias"), "bias"
    if weight.unit == OUTSIDE:
        yield f"{_OUTSIDE.get(name, name)}.{part}"
    else:
        yield f"model.layers.{weight.unit}.{_IN_BLOCKS.get(name, name)}.{part}"
