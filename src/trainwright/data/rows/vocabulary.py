"""Tokens that a model has no embedding for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def unknown_token(token: int, tokenizer: PreTrainedTokenizerBase, embeddings: int | None) -> str | None:
    """Return a message if a model with this number of embeddings has none for ``token``."""
    if embeddings is None or token < embeddings:
        return None
    return (
        f"has the token {tokenizer.convert_ids_to_tokens(token)!r} (id {token:,}), but the model has only "
        f"{embeddings:,} embeddings; remove it from the rows, or set model.tokenizer to the tokenizer of the model"
    )
