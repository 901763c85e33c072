"""Small configurations of every causal architecture of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

_SIZES: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32},
    **{"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048, "pad_token_id": 0},
    **{"sliding_window": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 1},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"shared_expert_intermediate_size": 96, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24},
    **{"state_size": 16, "mamba_d_state": 16, "mamba_d_ssm": 256, "chunk_size": 64, "mamba_chunk_size": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"lru_width": 128, "attention_window_size": 64, "bos_token_id": 1, "eos_token_id": 2},
}
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_expand": 2}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 2048, **_NO_DROPOUT},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "n_group": 1},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "expand": 2},
    "bamba": {**_HYBRID, "attn_layer_indices": [1, 3]},
    "falcon_h1": _HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {
        **{"n_mamba_heads": 8, "mamba_headdim": 32, "mamba_ngroups": 1, "num_key_value_heads": 4, "num_mem_blocks": 1},
        **{"attention_head_dim": 64, "layers_block_type": ["mamba", "hybrid"] * 2},
    },
}


def causal_families() -> list[str]:
    """Return the architectures of transformers that have a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small(family: str) -> dict[str, Any]:
    """Return a configuration of a family with the sizes above, as far as it has them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    names = {field.name for field in dataclasses.fields(kind)} | set(getattr(kind, "attribute_map", {}))
    return {"model_type": family, **{key: size for key, size in _SIZES.items() if key in names}, **_OWN.get(family, {})}
