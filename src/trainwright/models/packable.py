"""Models that cannot be trained on packs, determined from config.json. Imports neither torch nor transformers.

``causal_lm.check_model`` verifies this on the model itself before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.errors import RequestError

_DISTANCE = "its attention uses the distance between tokens in the row (ALiBi)"
_WHOLE_ROW = "its attention does not know where documents begin"
_STATE = "the state of its recurrent layers continues from one document into the next"
_OWN_ATTENTION = {
    **dict.fromkeys(("bloom", "mpt"), _DISTANCE),
    **dict.fromkeys(("falcon", "nemotron", "openai-gpt", "stablelm"), _WHOLE_ROW),
}
_RECURRENT_LAYERS = {
    *("bamba", "granitemoehybrid", "jamba", "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "zamba", "zamba2"),
}
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention"}


def check_packable(config: Mapping[str, Any], pack_length: int | None) -> None:
    """Raise RequestError if the model of ``config`` cannot be trained on packs of ``pack_length`` tokens."""
    if pack_length is not None and (why := unpackable(config, pack_length)) is not None:
        raise RequestError(
            f"data.pack_length: a model of the architecture {config.get('model_type')} does not keep packed documents "
            f"apart: {why}; set it to null"
        )


def unpackable(config: Mapping[str, Any], pack_length: int) -> str | None:
    """Return why packs of ``pack_length`` tokens would mix documents, or None if no reason is known."""
    kind = str(config.get("model_type"))
    if kind in _OWN_ATTENTION:
        return _OWN_ATTENTION[kind]
    if kind in _RECURRENT_LAYERS:
        layers = config.get("layer_types")
        return None if isinstance(layers, list) and layers and set(layers) <= _ATTENTION_LAYERS else _STATE
    if kind == "llama4_text" and config.get("attn_temperature_tuning", True):
        limit = config.get("floor_scale", 8192)
        if isinstance(limit, int) and pack_length >= limit:
            return f"from token {limit} of a row on its attention is scaled by the place in the row"
    return None
