"""Call tokenizers, and raise their failures as errors in words.

The pre-tokenization pattern comes with the model. If its search backtracks too much, the library stops after ten
million steps of one match with a Rust panic, an exception that is not an ``Exception`` in Python.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.formats import TurnsError
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerError(RequestError):
    """The tokenizer itself fails, independent of the row."""


def shorten_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the last part of a tokenizer's name or path, for messages; empty if it has none."""
    return os.path.basename(str(tokenizer.name_or_path).rstrip("/"))


def call_tokenizer(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> Any:
    """Return ``tokenizer(texts, **options)``.

    Raises:
        TokenizerError: the tokenizer panics.
        TurnsError: a tokenizer of characters lacks one of a text. It would drop it, and count offsets without it.
    """
    texts = list(texts)
    if tokenizer.init_kwargs.get("characters"):
        vocabulary = tokenizer.get_vocab().keys()
        for index, text in enumerate(texts):
            if unknown := set(text) - vocabulary:
                raise TurnsError(
                    f"the tokenizer has no token for {min(unknown)!r}, of the text or of the chat template around it; "
                    "set model.tokenizer to bytes, bpe:SIZE:SOURCE, or characters:FILE of a text that has it",
                    index,
                )
    with convert_panics(shorten_name(tokenizer)):
        return tokenizer(texts, **options)


@contextmanager
def convert_panics(name: str = "") -> Iterator[None]:
    """Raise a panic of the tokenizer called ``name`` as a TokenizerError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"the tokenizer {name}".strip()
            + f" fails: {error}; check its regular expression (pre_tokenizer in tokenizer.json); use another tokenizer"
        ) from None


def check_token(token: int, tokenizer: PreTrainedTokenizerBase, embeddings: int | None) -> str | None:
    """Return a message if a model with this number of embeddings has none for ``token``."""
    if embeddings is None or token < embeddings:
        return None
    return (
        f"has the token {tokenizer.convert_ids_to_tokens(token)!r} (id {token:,}), but the model has only "
        f"{embeddings:,} embeddings; remove it from the rows, or set model.tokenizer to the tokenizer of the model"
    )
