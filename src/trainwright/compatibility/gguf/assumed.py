"""What readers of GGUF files derive from other values, because the format has no key for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The numbers of layers of the largest Gemma 2 and Gemma 3, which scale queries by the width of the model.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def query_scalar(architecture: str, layers: int, heads: int, width: int, head: int) -> float:
    """Return what llama.cpp takes for Gemma's ``query_pre_attn_scalar``."""
    return width / heads if layers == _LARGEST[architecture] else head


def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a SentencePiece tokenizer adds a space before a text."""
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False).input_ids)
    return str(tokens[0]).startswith("\u2581")
