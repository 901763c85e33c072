"""What a task trains and which models it runs in addition, in the terms of a plan. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.memory.inventory import OUTSIDE, Weight, inventory
from trainwright.planning.workload import ReferenceWork

if TYPE_CHECKING:
    from trainwright.recipe.task_spec import Needs

# Parameter names of most families, by purpose.
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


def reference_work(needs: Needs, architecture: Architecture, *, adapted: bool) -> ReferenceWork | None:
    """Return the model that runs or is in memory in addition, or None. ``adapted``: an adapter is trained."""
    reference = needs.reference
    if reference is None:
        return None
    if not reference.every_step:
        # It runs once, before the first step; a model with its own weights stays in memory nevertheless.
        return ReferenceWork(architecture.layers, 0.0, True) if reference.own_weights else None
    last = reference.last_block
    blocks = architecture.layers if last is None else min(last + 1, architecture.layers)
    return ReferenceWork(blocks, reference.share, reference.own_weights or not adapted)


def trained(needs: Needs, architecture: Architecture, assumptions: list[str]) -> frozenset[tuple[int, str]] | None:
    """Return the trained parameters as ``(unit, name)`` of an inventory; None: all."""
    last = needs.last_block
    if last is None and needs.trainable is None:
        return None
    patterns, key = needs.trainable or (None, "")
    weights = inventory(architecture, 4, True).weights
    found = frozenset((w.unit, w.name) for w in weights if _wanted(w, patterns, last))
    if not found:
        assumptions.append(
            f"all parameters assumed trainable: the parameter names of {architecture.family} are unknown, so {key} "
            "cannot be matched"
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
