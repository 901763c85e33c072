"""Small configurations of causal language models of any family that transformers has."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

# Values of keys as configurations call them; a family takes those that it has.
_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "activation_dropout",
    "classifier_dropout",
    "embedding_dropout",
    "embd_dropout",
    "ffn_dropout",
    "attn_dropout",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_expand": 2},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_expand": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"n_groups": 1, "expand": 2},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 0},
}


def causal_families() -> list[str]:
    """Return the model types of transformers that have a causal language model, in alphabetical order."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys())


def small_config(family: str, seed: int) -> dict[str, Any]:
    """Return a configuration of a few million parameters, its sizes drawn by ``seed``, as a recipe has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    chance = random.Random(f"{seed} {family}")
    hidden, heads = chance.choice([(128, 4), (192, 6), (256, 4), (320, 5), (384, 6)])
    layers, size = chance.choice([2, 4, 6]), hidden // heads
    values: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), hidden),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), chance.choice([2, 3, 4]) * hidden),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), heads),
        **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels"), size),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 1024),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 2 * hidden // 8),
        **dict.fromkeys(("state_size", "mamba_d_state"), 16),
        **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 64),
        **dict.fromkeys(_EXPERTS, chance.choice([4, 8])),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k"), 2),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), hidden),
        **dict.fromkeys(_DROPOUTS, 0.0),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
        "num_key_value_heads": chance.choice([heads, heads // 2 if heads % 2 == 0 else 1]),
        "vocab_size": chance.choice([512, 4096, 16384]),
        "tie_word_embeddings": chance.random() < 0.5,
        "pad_token_id": 0,
        "sliding_window": chance.choice([64, 512]),
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "mamba_d_ssm": 2 * hidden,
        "lru_width": hidden,
        "attention_window_size": 128,
    }
    kind = CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(kind)} | set(getattr(kind, "attribute_map", {}))
    own = _FAMILY.get(family, {})
    if "word_embed_proj_dim" in own:
        own = {**own, "word_embed_proj_dim": hidden}
    if "layer_types" in own:
        values |= {"num_hidden_layers": len(own["layer_types"])}
    return {"model_type": family, **{key: value for key, value in values.items() if key in known}, **own}
