"""Models of several modalities, by their configurations: their language model is trained. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OTHER_PARTS = ("vision_config", "audio_config")
_OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype")


def select_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model in that of a model of several modalities; others as they are."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not any(name in config for name in _OTHER_PARTS):
        return config
    of_whole = {name: config[name] for name in _OF_WHOLE if config.get(name) is not None}
    return {**of_whole, "model_type": f"{config.get('model_type')}_text", **text}
