"""Count the bytes of text of each token, which makes losses of different vocabularies comparable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD_BEGINS = "\u2581"  # represents a space in SentencePiece vocabularies


def token_bytes(tokenizer: PreTrainedTokenizerBase, size: int) -> npt.NDArray[np.int64]:
    """Return the number of UTF-8 bytes of every token [size]; 0 for special and unused tokens."""
    backend: Any = tokenizer.backend_tokenizer
    bytewise = "ByteLevel" in str(backend.decoder)  # then each character of a token is a byte
    special = set(tokenizer.all_special_ids)
    found = np.zeros(size, dtype=np.int64)
    for text, token in tokenizer.get_vocab().items():
        if token not in special and token < size:
            found[token] = len(text) if bytewise else _length(text)
    return found


def _length(text: str) -> int:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):  # a byte-fallback token
        return 1
    return len(text.replace(_WORD_BEGINS, " ").encode())
