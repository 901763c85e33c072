"""The architecture of the GPT of models/gpt/model.py. Imports no torch."""

from __future__ import annotations

from typing import Any

from trainwright.errors import RequestError
from trainwright.models.gpt import variants as gpt_variants
from trainwright.planning.architectures.families import Values, architecture_fields


def gpt_fields(config: Values, origin: str) -> dict[str, Any]:
    """Return the fields of Architecture: those of the equivalent transformers architecture, with fused matrices.

    Raises:
        RequestError: the variant is unknown.
    """
    try:
        values = gpt_variants.expanded(config)
    except KeyError as error:
        known = ", ".join(gpt_variants.VARIANTS)
        raise RequestError(f"{origin}.variant: {error.args[0]} is none of {known}") from None
    dropout = values.get("dropout", 0.0)
    if values["position_embedding"] == "learned":
        theirs = {
            "activation_function": "gelu" if values["mlp"] == "gelu" else "gelu_pytorch_tanh",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        }
        fields = architecture_fields({**values, **theirs, "model_type": "gpt2"}, origin)
        bias = bool(values["bias"])
        biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), bias)
        return {**(fields or {}), **biases, "family": gpt_variants.MODEL_TYPE}
    kind = "qwen3" if values["qk_norm"] else "llama"
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    fields = architecture_fields({**values, "head_dim": head_dim, "model_type": kind, "rope_parameters": None}, origin)
    dropouts = dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), dropout)
    fused = {"fused_qkv": True, "fused_gate_up": True}
    return {**(fields or {}), **dropouts, **fused, "family": gpt_variants.MODEL_TYPE}
