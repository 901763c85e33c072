"""The sizes of the GPT by name, and the defaults of its configuration. Imports no torch.

The gpt2 sizes are those of Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2; the
modern ones have the same depth and width, with the components of Llama 3 (arXiv 2407.21783, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "gpt"

_GPT2: dict[str, Any] = {
    "max_position_embeddings": 1024,
    "position_embedding": "learned",
    "norm": "layer",
    "mlp": "gelu_tanh",
    "bias": True,
    "qk_norm": False,
    "tie_word_embeddings": True,
}
_MODERN: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "position_embedding": "rotary",
    "norm": "rms",
    "mlp": "swiglu",
    "bias": False,
    "qk_norm": True,
    "tie_word_embeddings": True,
}


def _list_size_keys(layers: int, heads: int, hidden: int, key_value_heads: int | None = None) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "hidden_size": hidden,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {**_list_size_keys(12, 12, 768), **_GPT2},
    "gpt2-medium": {**_list_size_keys(24, 16, 1024), **_GPT2},
    "gpt2-large": {**_list_size_keys(36, 20, 1280), **_GPT2},
    "gpt2-xl": {**_list_size_keys(48, 25, 1600), **_GPT2},
    "modern": {**_list_size_keys(12, 12, 768, 4), **_MODERN},
    "modern-medium": {**_list_size_keys(24, 16, 1024, 4), **_MODERN},
    "modern-large": {**_list_size_keys(36, 20, 1280, 4), **_MODERN},
    "modern-xl": {**_list_size_keys(48, 25, 1600, 5), **_MODERN, "tie_word_embeddings": False},
}
# The defaults of all keys: those of the smallest GPT-2.
DEFAULTS: dict[str, Any] = VARIANTS["gpt2"]


def expand_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with all keys: those of its ``variant``, overridden by its own.

    Raises:
        KeyError: the variant is unknown.
    """
    values = {**VARIANTS[config.get("variant") or "gpt2"], **config}
    values.pop("variant", None)
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    if not values.get("intermediate_size"):
        hidden = values["hidden_size"]
        # Three matrices with as many weights in total as two (arXiv 2002.05202), rounded up to multiples of 64.
        wide = -(-8 * hidden // 3 // 64) * 64 if values["mlp"] == "swiglu" else 4 * hidden
        values["intermediate_size"] = wide
    return values
