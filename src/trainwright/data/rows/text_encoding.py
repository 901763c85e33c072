"""Encode plain texts as tokens: all are targets, and the end-of-text token follows.

A text that was written with a chat template has the beginning and the end already, and gets no second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainwright.data.rows.bounded import tokenized
from trainwright.data.rows.chat_encoding import ChatEncoder, Encoded
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextEncoder:
    """Encodes texts with a tokenizer. ``notes`` has messages about it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.notes = [] if tokenizer.eos_token is not None else ["the tokenizer has no end-of-text token"]
        self._tokenizer = tokenizer
        self._ends = ends_of(tokenizer)

    def encode(self, texts: Sequence[str], remarks: Sequence[set[str]] | None = None) -> list[Encoded]:
        """Return ``(ids, targets)`` of each text.

        Args:
            remarks: for each text, collects what it has of a template, as verb phrases.
        """
        eos = self._tokenizer.eos_token_id
        stripped = [text.rstrip() for text in texts]
        ended = [text.endswith(self._ends) for text in stripped]
        # As in a conversation, white space after the end is not trained on.
        wanted = [short if ends else text for text, short, ends in zip(texts, stripped, ended, strict=True)]
        encoded = []
        for index, ids in enumerate(_ids(self._tokenizer, wanted)):
            single = _without_second(ids, self._tokenizer.bos_token_id)
            if remarks is not None and len(single) < len(ids):
                remarks[index].add("begin with the beginning-of-text token, which is not added again")
            if remarks is not None and ended[index]:
                remarks[index].add("end with the end of a text or of a turn, after which no other is added")
            whole = single if eos is None or ended[index] or single[-1:] == [eos] else [*single, eos]
            encoded.append((whole, [True] * len(whole)))
        return encoded

    def ways(self) -> list[str]:
        """Return nothing: every part of a text is encoded."""
        return []


def text_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, with the beginning-of-text token if the tokenizer prepends it, but not twice."""
    return [_without_second(ids, tokenizer.bos_token_id) for ids in _ids(tokenizer, texts)]


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return list(tokenized(tokenizer, texts, return_attention_mask=False, verbose=False)["input_ids"])


def _without_second(ids: list[int], bos: int | None) -> list[int]:
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def ends_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of the tokens that end a text or an assistant turn."""
    return tuple(end for end in dict.fromkeys((tokenizer.eos_token, _stop_of_turns(tokenizer))) if end)


def _stop_of_turns(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that ends an assistant turn in the tokenizer's chat template, or "" if it has none."""
    if tokenizer.chat_template is None:
        return ""
    try:
        return ChatEncoder(tokenizer).stop.strip()
    except RequestError:  # a template that renders no conversation does not matter for texts
        return ""
