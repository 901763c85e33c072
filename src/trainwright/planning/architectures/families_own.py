"""Families whose configurations have their own key names: their keys, default values and fixed properties.

As in families.py; the values are those of the configurations of transformers 5. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from trainwright.planning.architectures.family import EQUAL_HEADS, LAYER_NORM, NO_INTERMEDIATE, Family, Values


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
