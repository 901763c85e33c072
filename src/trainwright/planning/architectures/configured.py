"""Convert a model's configuration to its architecture, for known and unknown families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainwright.errors import RequestError
from trainwright.models.gpt import variants as gpt_variants
from trainwright.planning.architectures import traced
from trainwright.planning.architectures.architecture import Architecture
from trainwright.planning.architectures.families import architecture_fields

# A hundred times the largest existing models. A plan iterates over buckets and shards of parameters, so much larger
# models would take it minutes.
_MOST_PARAMETERS = 10**14


def architecture_of_config(config: Mapping[str, Any], origin: str) -> Architecture:
    """Return the architecture that a configuration describes.

    An unknown family is traced; if that is impossible, it has the architecture of a llama of its sizes. It keeps its
    own name.

    Raises:
        RequestError: keys are missing or invalid; the message starts with ``origin``.
    """
    try:
        found = from_config(config, origin)
    except RequestError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RequestError(f"{origin}: invalid value ({what})") from error
    if found is not None:
        return found
    text = json.dumps(dict(config), sort_keys=True)
    try:
        return _from_trace(str(config["model_type"]), text, traced.layout(text))
    except traced.TraceError as failure:
        try:
            found = from_config({**config, "model_type": "llama"}, origin)
        except RequestError as error:
            raise RequestError(
                f"{error}; {config['model_type']} is not supported, and could not be traced: {failure}"
            ) from None
        assert found is not None
        return replace(found, family=str(config["model_type"]))


def from_config(config: Mapping[str, Any], origin: str = "config.json") -> Architecture | None:
    """Return the architecture that a transformers configuration describes; None for an unknown model_type.

    For a model that also takes images (gemma3) it is that of the language model. Missing keys have transformers'
    defaults, except those that determine the model's size, which are required.

    Raises:
        RequestError: keys are missing or invalid; the message starts with ``origin``.
    """
    ours = config.get("model_type") == gpt_variants.MODEL_TYPE
    fields = _gpt_fields(config, origin) if ours else architecture_fields(config, origin)
    if fields is None:
        return None
    found = Architecture(**fields)
    if (count := found.parameters().total) > _MOST_PARAMETERS:
        raise RequestError(
            f"{origin}: these sizes give {count:.1e} parameters, too many to train; check hidden_size, "
            "intermediate_size and other sizes"
        )
    return found


def _from_trace(family: str, config: str, layout: Mapping[str, Any]) -> Architecture:
    hidden, heads = layout["hidden"], layout["heads"]
    block = sum(rows * columns for unit, _, rows, columns in layout["weights"] if unit == 0)
    attention = 2 * hidden * hidden * (1 + layout["key_value_heads"] / heads)
    widest = layout["intermediate"]
    # Two matrices of the widest rows, three, or two with half of them if gate and up are fused.
    forms = ((2, False, widest), (3, True, widest), (1.5, True, widest // 2))
    _, gated, intermediate = min(forms, key=lambda form: abs(form[0] * hidden * widest - (block - attention)))
    return Architecture(
        family=family,
        config=config,
        layers=layout["layers"],
        hidden=hidden,
        heads=heads,
        key_value_heads=layout["key_value_heads"],
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocabulary=layout["vocabulary"],
        positions=layout["positions"],
        tied=layout["tied"],
        gated=gated,
        traced_parameters=sum(rows * columns for _, _, rows, columns in layout["weights"]),
        norm="layer" if layout["norm_bias"] else "rms",
        norm_bias=layout["norm_bias"],
        head_bias=layout["head_bias"],
        whole_logits=layout["whole_logits"],
        learned_positions=layout["learned_positions"],
        rotary_layers=0 if layout["learned_positions"] else layout["layers"],
    )


def _gpt_fields(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields of Architecture: those of the equivalent transformers architecture, with fused matrices.

    Raises:
        RequestError: the variant is unknown.
    """
    try:
        values = gpt_variants.expanded(config)
    except KeyError as error:
        known = ", ".join(gpt_variants.VARIANTS)
        raise RequestError(f"{origin}.variant: {error.args[0]} is an unknown variant; choose from {known}") from None
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
