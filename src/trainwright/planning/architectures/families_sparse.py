"""Configuration keys, default values and fixed properties of families with experts.

As in families.py; the values are those of the configurations of transformers 5. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from trainwright.planning.architectures.family import EXPERT_SIZES, NO_INTERMEDIATE, SIZES, Family, Values, experts

_LOCAL = {"num_local_experts": "num_experts", "num_experts": "num_experts"}
_MIXTRAL = {**_LOCAL, "intermediate_size": "moe_intermediate_size"}
_DEEPSEEK = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
_LATENT_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def _latent(values: Values) -> dict[str, Any]:
    """Return the fields of DeepSeek's attention and experts; multi-token prediction is not trained."""
    from trainwright.planning.architectures.architecture import Latent

    return {
        **_after_dense(values),
        "latent": Latent(
            values["q_lora_rank"] or 0, values["kv_lora_rank"], values["qk_rope_head_dim"], values["v_head_dim"]
        ),
        "key_value_heads": values["num_attention_heads"],
        "head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        "rotary": values["qk_rope_head_dim"] / (values["qk_nope_head_dim"] + values["qk_rope_head_dim"]),
    }


def _glm4_moe(values: Values) -> dict[str, Any]:
    return {
        **_after_dense(values),
        "output_bias": False,
        "qk_norm": "head" if values["use_qk_norm"] else "none",
    }


def _after_dense(values: Values) -> dict[str, Any]:
    """Return the fields of experts in all blocks except the first ones, with shared experts."""
    first, blocks = values["first_k_dense_replace"] or 0, values["num_hidden_layers"]
    return {
        **experts(values),
        "shared_intermediate": (values["n_shared_experts"] or 0) * values["moe_intermediate_size"],
        "first_dense": min(first, blocks),
        "sparse_layers": max(0, blocks - first),
    }


def _llama4(values: Values) -> dict[str, Any]:
    layers, every = values["num_hidden_layers"], values["interleave_moe_layer_step"]
    sparse = values["moe_layers"]
    written, step = values["no_rope_layers"], values["no_rope_layer_interval"]
    rotated = sum(bool(written[block]) if written else bool((block + 1) % step) for block in range(layers))
    chunk = values["attention_chunk_size"]
    return {
        "experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "expert_intermediate": values["moe_intermediate_size"],
        "shared_intermediate": values["moe_intermediate_size"],
        "sparse_layers": len(sparse) if sparse is not None else layers // every,
        "rotary_layers": rotated,
        "window": chunk if rotated else None,
        "windowed_layers": rotated if chunk else 0,
    }


def _qwen3_next(values: Values) -> dict[str, Any]:
    from trainwright.planning.architectures.architecture import DeltaNet

    layers, kinds = values["num_hidden_layers"], values["layer_types"]
    linear = kinds.count("linear_attention") if kinds else layers - layers // values["full_attention_interval"]
    return {
        **experts(values),
        "shared_intermediate": values["shared_expert_intermediate_size"],
        "linear_layers": linear,
        "delta": DeltaNet(
            values["linear_num_key_heads"],
            values["linear_num_value_heads"],
            values["linear_key_head_dim"],
            values["linear_value_head_dim"],
            values["linear_conv_kernel_dim"],
        ),
    }


def _granitemoe(values: Values) -> dict[str, Any]:
    return {
        **experts(values),
        "scaled_embedding": values["embedding_multiplier"] != 1.0,
        "scaled_residual": values["residual_multiplier"] != 1.0,
        "scaled_logits": values["logits_scaling"] != 1.0,
    }


def _deepseek(positions: int, shared: int, dense: int) -> Family:
    """Return a DeepSeek family. ``shared``: number of shared experts; ``dense``: number of blocks without experts."""
    return Family(
        names=_DEEPSEEK,
        absent={
            "max_position_embeddings": positions,
            "n_shared_experts": shared,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "first_k_dense_replace": dense,
        },
        more=_latent,
        sizes=(*SIZES, *EXPERT_SIZES, *_LATENT_SIZES),
    )


SPARSE: dict[str, Family] = {
    "olmoe": Family(
        names=_MIXTRAL,
        absent={"max_position_embeddings": 4096},
        fixed={"qk_norm": "all"},
        more=experts,
        sizes=(*NO_INTERMEDIATE, *EXPERT_SIZES),
    ),
    "phimoe": Family(
        names=_MIXTRAL,
        absent={"num_key_value_heads": 8, "max_position_embeddings": 131072, "lm_head_bias": False},
        fixed={"norm": "layer", "norm_bias": True},
        more=lambda values: {**experts(values), "head_bias": bool(values["lm_head_bias"])},
        sizes=(*NO_INTERMEDIATE, *EXPERT_SIZES),
    ),
    "granitemoe": Family(
        names=_MIXTRAL,
        absent={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        more=_granitemoe,
        sizes=(*NO_INTERMEDIATE, *EXPERT_SIZES),
    ),
    "gpt_oss": Family(
        names=_MIXTRAL,
        absent={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "attention_bias": True,
        },
        fixed={"sinks": True, "expert_bias": True, "router_bias": True},
        windowed=lambda values, block: block % 2 == 0,
        more=experts,
        sizes=(*NO_INTERMEDIATE, *EXPERT_SIZES),
    ),
    "deepseek_v3": _deepseek(positions=4096, shared=1, dense=3),
    "deepseek_v2": _deepseek(positions=2048, shared=2, dense=0),
    "glm4_moe": Family(
        names=_DEEPSEEK,
        absent={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        more=_glm4_moe,
        sizes=(*SIZES, *EXPERT_SIZES),
    ),
    "llama4_text": Family(
        names={**_LOCAL, "intermediate_size": "moe_intermediate_size", "intermediate_size_mlp": "intermediate_size"},
        absent={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
        },
        fixed={"every_expert": True},
        more=_llama4,
        sizes=(*SIZES, *EXPERT_SIZES),
    ),
    "qwen3_next": Family(
        names=_LOCAL,
        absent={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "shared_expert_intermediate_size": 512,
        },
        fixed={"qk_norm": "head", "query_gate": True, "shared_gate": True},
        more=_qwen3_next,
        sizes=(*SIZES, *EXPERT_SIZES),
    ),
}
