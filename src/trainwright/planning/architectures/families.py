"""Configuration keys, default values and fixed properties of each model family.

Keys and defaults are those of the configurations of transformers 5; fixed properties are those of its modeling code.
Imports no torch.

As in families.py; the values are those of the configurations of transformers 5. Imports no torch.

As in families.py; the values are those of the configurations of transformers 5. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.errors import RequestError
from trainwright.planning.architectures.family import (
    EQUAL_HEADS,
    EXPERT_SIZES,
    LAYER_NORM,
    NO_INTERMEDIATE,
    SIZES,
    Family,
    Values,
    experts,
)

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


def _falcon(values: Values) -> dict[str, Any]:
    heads, newer = values["num_attention_heads"], bool(values["new_decoder_architecture"])
    groups = (values["num_key_value_heads"] or heads) if newer else 1 if values["multi_query"] else heads
    parallel, alibi = newer or bool(values["parallel_attn"]), bool(values["alibi"])
    norms = values["num_ln_in_parallel_attn"] or (2 if newer else 1)
    return {
        "key_value_heads": groups,
        "intermediate": values["intermediate_size"] or 4 * values["hidden_size"],
        "parallel": parallel,
        "block_norms": norms if parallel else 2,
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(values["bias"])),
        "residual_dropout": values["hidden_dropout"],
        "alibi": alibi,
        "rotary_layers": 0 if alibi else values["num_hidden_layers"],
        "rotary": 0.0 if alibi else 1.0,
    }


def _gpt_neox(values: Values) -> dict[str, Any]:
    return {
        "parallel": bool(values["use_parallel_residual"]),
        "residual_dropout": values["hidden_dropout"],
        "embedding_dropout": values["hidden_dropout"],
    }


OWN: dict[str, Family] = {
    "gpt2": Family(
        names={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "activation_function": "hidden_act",
            "resid_pdrop": "residual_dropout",
            "embd_pdrop": "embedding_dropout",
            "attn_pdrop": "attention_dropout",
            **EQUAL_HEADS,
        },
        absent={
            "hidden_act": "gelu_new",
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "attention_dropout": 0.1,
        },
        fixed={
            **LAYER_NORM,
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "fused_qkv": True,
            "learned_positions": True,
            "rotary": 0.0,
            "rotary_layers": 0,
        },
        more=lambda values: {"intermediate": values["intermediate_size"] or 4 * values["hidden_size"]},
        sizes=NO_INTERMEDIATE,
    ),
    "gpt_neox": Family(
        names={"rotary_pct": "partial_rotary_factor", **EQUAL_HEADS},
        absent={
            "hidden_act": "gelu",
            "attention_bias": True,
            "hidden_dropout": 0.0,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.25,
        },
        fixed={**LAYER_NORM, "mlp_bias": True, "fused_qkv": True},
        more=_gpt_neox,
    ),
    "falcon": Family(
        names={
            "num_kv_heads": "num_key_value_heads",
            "ffn_hidden_size": "intermediate_size",
            "activation": "hidden_act",
        },
        absent={
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "hidden_dropout": 0.0,
            "num_ln_in_parallel_attn": None,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
        },
        fixed={**LAYER_NORM, "fused_qkv": True},
        more=_falcon,
        sizes=NO_INTERMEDIATE,
    ),
    "mpt": Family(
        names={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
            **EQUAL_HEADS,
        },
        absent={"hidden_act": "gelu", "tie_word_embeddings": True},
        fixed={**LAYER_NORM, "norm_bias": False, "fused_qkv": True, "alibi": True, "rotary": 0.0, "rotary_layers": 0},
        more=lambda values: {"intermediate": 4 * values["hidden_size"]},
        sizes=NO_INTERMEDIATE,
    ),
}


# Models that also take images, and the model_type of their language model.
_OF_SEVERAL_PARTS = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
_OTHER_COUNTS = (
    "intermediate_size",
    "max_position_embeddings",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "intermediate_size": None,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "sliding_window": None,
    "layer_types": None,
    "partial_rotary_factor": 1.0,
}


def architecture_fields(config: Values, origin: str) -> dict[str, Any] | None:
    """Return the fields of an Architecture that ``config`` sets; None for an unknown model_type.

    Raises:
        RequestError: names the keys that are missing or invalid.
    """
    kind = config.get("model_type")
    if kind is None:
        raise RequestError(f"{origin}: model_type is missing, the name of a transformers architecture")
    if kind in _OF_SEVERAL_PARTS and isinstance(config.get("text_config"), Mapping):
        kind, config = _OF_SEVERAL_PARTS[kind], config["text_config"]
    if kind not in FAMILIES:
        return None
    family = FAMILIES[kind]
    values = {**_COMMON, **family.absent, **{family.names.get(key, key): config[key] for key in config}}
    values["sliding_window"] = values["sliding_window"] or None  # transformers also writes 0 for none
    _check_sizes(values, family, origin)
    return {"family": kind, **_fields(values, family, origin), **family.fixed, **family.more(values)}


def _check_sizes(values: Values, family: Family, origin: str) -> None:
    called = {ours: theirs for theirs, ours in family.names.items()}
    missing = [called.get(key, key) for key in family.sizes if values.get(key) is None]
    if missing:
        raise RequestError(f"{origin}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for key in (*family.sizes, *_OTHER_COUNTS):
        value = values[key]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise RequestError(
                f"{origin}: {called.get(key, key)}: expected a whole number of at least 1, not {value!r}"
            )


def _fields(values: Values, family: Family, origin: str) -> dict[str, Any]:
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    groups = values["num_key_value_heads"] or heads
    if heads % groups:
        raise RequestError(f"{origin}: {heads} attention heads cannot share {groups} key and value heads")
    if values["head_dim"] is None and values["hidden_size"] % heads:
        raise RequestError(f"{origin}: hidden_size {values['hidden_size']} is not a multiple of {heads} heads")
    windowed = _windowed(values, family, layers)
    return {
        "layers": layers,
        "hidden": values["hidden_size"],
        "heads": heads,
        "key_value_heads": groups,
        "head_dim": values["head_dim"] or values["hidden_size"] // heads,
        "intermediate": values["intermediate_size"] or 0,
        "vocabulary": values["vocab_size"],
        "positions": values["max_position_embeddings"],
        "tied": bool(values["tie_word_embeddings"]),
        "activation": values["hidden_act"],
        "qkv_bias": bool(values["attention_bias"]),
        "output_bias": bool(values["attention_bias"]),
        "rotary": (values.get("rope_parameters") or {}).get("partial_rotary_factor", values["partial_rotary_factor"]),
        "rotary_layers": layers,
        "window": values["sliding_window"] if windowed else None,
        "windowed_layers": windowed,
        "attention_dropout": values["attention_dropout"],
        "residual_dropout": values["residual_dropout"],
        "embedding_dropout": values["embedding_dropout"],
    }


def _windowed(values: Values, family: Family, layers: int) -> int:
    if values["sliding_window"] is None:
        return 0
    if values["layer_types"] is not None:
        return list(values["layer_types"]).count("sliding_attention")
    return sum(family.windowed(values, block) for block in range(layers))


def _late_blocks(values: Values, block: int) -> bool:
    return bool(values["use_sliding_window"]) and block >= values["max_window_layers"]


def _qwen2_moe(values: Values) -> dict[str, Any]:
    shared = values["shared_expert_intermediate_size"]
    return {
        **experts(values),
        "qkv_bias": bool(values["qkv_bias"]),
        "shared_intermediate": shared,
        "shared_gate": True,
    }


def _mlp_bias(values: Values) -> dict[str, Any]:
    return {"mlp_bias": bool(values.get("mlp_bias"))}


def _smollm3(values: Values) -> dict[str, Any]:
    rotated = sum(_rotated(values, block) for block in range(values["num_hidden_layers"]))
    return {**_mlp_bias(values), "rotary_layers": rotated}


def _rotated(values: Values, block: int) -> bool:
    written = values["no_rope_layers"]  # 1 for blocks with rotary positions
    return bool(written[block] if written else (block + 1) % values["no_rope_layer_interval"])


def _granite(values: Values) -> dict[str, Any]:
    return {
        **_mlp_bias(values),
        "scaled_embedding": values["embedding_multiplier"] != 1.0,
        "scaled_residual": values["residual_multiplier"] != 1.0,
        "scaled_logits": values["logits_scaling"] != 1.0,
    }


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MIXTRAL_NAMES = {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_PHI_NAMES = {"resid_pdrop": "residual_dropout", "embd_pdrop": "embedding_dropout"}
_NO_BIAS = {"qkv_bias": False, "output_bias": False}

FAMILIES: dict[str, Family] = {
    **OWN,
    **SPARSE,
    "llama": Family(more=_mlp_bias),
    "mistral": Family(
        absent={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        fixed=_NO_BIAS,
    ),
    "mixtral": Family(
        names=_MIXTRAL_NAMES,
        absent={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        fixed=_NO_BIAS,
        more=experts,
        sizes=(*NO_INTERMEDIATE, *EXPERT_SIZES),
    ),
    "qwen2": Family(
        absent={"num_key_value_heads": 32, "max_position_embeddings": 32768, **_QWEN_WINDOW},
        fixed={"qkv_bias": True, "output_bias": False},
        windowed=_late_blocks,
    ),
    "qwen3": Family(
        absent={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, **_QWEN_WINDOW},
        fixed={"qk_norm": "head"},
        windowed=_late_blocks,
    ),
    "qwen2_moe": Family(
        absent={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
            **_QWEN_WINDOW,
        },
        windowed=lambda values, block: (
            bool(values["use_sliding_window"]) and block < values["max_window_layers"] and block % 2 == 0
        ),
        more=_qwen2_moe,
        sizes=(*SIZES, *EXPERT_SIZES),
    ),
    "qwen3_moe": Family(
        names={"num_local_experts": "num_experts", "num_experts": "num_experts"},  # the last is the usual name
        absent={"num_key_value_heads": 4, "max_position_embeddings": 32768, **_QWEN_WINDOW},
        fixed={"qk_norm": "head"},
        windowed=lambda values, block: bool(values["use_sliding_window"]),
        more=experts,
        sizes=(*SIZES, *EXPERT_SIZES),
    ),
    "gemma": Family(absent={**_GEMMA, "num_key_value_heads": 16}, fixed={"scaled_embedding": True}),
    "gemma2": Family(
        names={"hidden_activation": "hidden_act"},
        absent={
            **_GEMMA,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed={"scaled_embedding": True, "block_norms": 4},
        windowed=lambda values, block: block % 2 == 0,
        more=lambda values: {
            "attention_softcap": values["attn_logit_softcapping"],
            "logit_softcap": values["final_logit_softcapping"],
        },
    ),
    "gemma3_text": Family(
        names={"hidden_activation": "hidden_act"},
        absent={  # published files also omit these
            **_GEMMA,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        fixed={"scaled_embedding": True, "block_norms": 4, "qk_norm": "head"},
        windowed=lambda values, block: bool((block + 1) % values["sliding_window_pattern"]),
        more=lambda values: {"logit_softcap": values.get("final_logit_softcapping")},
    ),
    "phi": Family(
        names=_PHI_NAMES,
        absent={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        fixed={
            **LAYER_NORM,
            "block_norms": 1,
            "parallel": True,
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "head_bias": True,
        },
        more=lambda values: {"qk_norm": "head" if values.get("qk_layernorm") else "none"},
    ),
    "phi3": Family(
        names=_PHI_NAMES,
        absent={"max_position_embeddings": 4096},
        fixed={**_NO_BIAS, "fused_qkv": True, "fused_gate_up": True},
    ),
    "smollm3": Family(
        absent={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        windowed=lambda values, block: bool(values["use_sliding_window"]) and not _rotated(values, block),
        more=_smollm3,
    ),
    "olmo2": Family(fixed={"qk_norm": "all", "post_norm": True}),
    "olmo3": Family(
        absent={"sliding_window": 4096},
        fixed={"qk_norm": "all", "post_norm": True},
        windowed=lambda values, block: bool((block + 1) % 4),
    ),
    "granite": Family(
        absent={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}, more=_granite
    ),
    "cohere": Family(
        absent={"max_position_embeddings": 8192, "tie_word_embeddings": True, "logit_scale": 0.0625},
        fixed={"norm": "layer", "block_norms": 1, "parallel": True, "scaled_logits": True},
        more=lambda values: {"qk_norm": "all" if values.get("use_qk_norm") else "none"},
    ),
    "starcoder2": Family(
        absent={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        fixed=LAYER_NORM,
        more=lambda values: {name: bool(values["use_bias"]) for name in ("qkv_bias", "output_bias", "mlp_bias")},
    ),
}
