"""Small configurations of causal language models of any family that transformers has."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
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


def causal_families() -> list[str]:
    """Return the model types of transformers that have a causal language model, in alphabetical order."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & CONFIG_MAPPING_NAMES.keys())


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a small model, as far as its family has them."""

    hidden: int = 128
    heads: int = 4
    layers: int = 4
    intermediate: int = 352
    experts: int = 4
    key_value_heads: int = 2
    vocabulary: int = 512
    tied: bool = False
    window: int = 64
    positions: int = 2048

    @classmethod
    def drawn(cls, family: str, seed: int) -> ModelSizes:
        """Return sizes of a model of a few million parameters."""
        chance = random.Random(f"{seed} {family}")
        hidden, heads = chance.choice([(128, 4), (192, 6), (256, 4), (320, 5), (384, 6)])
        return cls(
            hidden,
            heads,
            layers=chance.choice([2, 4, 6]),
            intermediate=chance.choice([2, 3, 4]) * hidden,
            experts=chance.choice([4, 8]),
            key_value_heads=chance.choice([heads, heads // 2 if heads % 2 == 0 else 1]),
            vocabulary=chance.choice([512, 4096, 16384]),
            tied=chance.random() < 0.5,
            window=chance.choice([64, 512]),
            positions=1024,
        )


def small_config(family: str, sizes: ModelSizes = ModelSizes()) -> dict[str, Any]:
    """Return a configuration of a family with these sizes, as a recipe has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    hidden, heads = sizes.hidden, sizes.heads
    values: dict[str, Any] = {
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), hidden),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), sizes.intermediate),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), sizes.layers),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), heads),
        **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels"), hidden // heads),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), sizes.positions),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 2 * hidden // 8),
        **dict.fromkeys(("state_size", "mamba_d_state"), 16),
        **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 64),
        **dict.fromkeys(_EXPERTS, sizes.experts),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k"), 2),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), hidden),
        **dict.fromkeys(_DROPOUTS, 0.0),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 32),
        "num_key_value_heads": sizes.key_value_heads,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": sizes.tied,
        "pad_token_id": 0,
        "sliding_window": sizes.window,
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
    keys = {field.name for field in dataclasses.fields(kind)} | set(getattr(kind, "attribute_map", {}))
    return {"model_type": family, **{key: value for key, value in values.items() if key in keys}, **_of(family, sizes)}


def _of(family: str, sizes: ModelSizes) -> dict[str, Any]:
    """Return the keys that only this family has, or that its model needs otherwise."""
    hidden, heads = sizes.hidden, sizes.heads
    hybrid = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_expand": 2}
    keys: dict[str, dict[str, Any]] = {
        "bamba": {**hybrid, "attn_layer_indices": [1]},
        "deepseek_v2": {"num_key_value_heads": heads, "n_group": 1},
        "deepseek_v3": {"num_key_value_heads": heads},
        "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "falcon_h1": hybrid,
        "jamba": {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
            "use_mamba_kernels": False,
        },
        "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
        "mamba2": {"num_heads": 8, "head_dim": 2 * hidden // 8, "n_groups": 1, "expand": 2},
        "opt": {"ffn_dim": 512, "word_embed_proj_dim": hidden},
        "zamba2": {
            **{"n_mamba_heads": 8, "mamba_headdim": 2 * hidden // 8, "mamba_ngroups": 1, "num_mem_blocks": 1},
            **{"num_key_value_heads": heads, "attention_head_dim": 2 * hidden // heads},
            **{"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
        },
    }
    return keys.get(family, {})
