"""The end of an answer: the model's own stop tokens, and stop texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.models.tokenization import token_ids, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Stop:
    """What ends an answer, without being part of it.

    Attributes:
        tokens: ids, any of which ends it.
        texts: texts, any of which ends it before its start.
    """

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()

    def with_texts(self, texts: Iterable[str]) -> Stop:
        """Return a copy with additional stop texts."""
        return Stop(self.tokens, (*self.texts, *(text for text in texts if text)))

    def before(self, text: str) -> str:
        """Return the part of ``text`` before the first stop text."""
        positions = [position for stop in self.texts if (position := text.find(stop)) >= 0]
        return text[: min(positions)] if positions else text

    def ended(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> bool:
        """Return whether the last token of ``ids`` has completed a stop text."""
        if not self.texts:
            return False
        # A token may be less than a character, so take as many as the text has bytes, and some for invisible ones.
        tail = str(tokenizer.decode(list(ids[-(max(len(text.encode()) for text in self.texts) + 8) :])))
        return any(text in tail for text in self.texts)


def stop_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> Stop:
    """Return the model's own stop.

    Args:
        chat: whether answers are turns of a conversation: then the end of a turn in the chat template ends them, too.
    """
    tokens = {*token_ids(tokenizer.eos_token_id), *token_ids(getattr(model.config, "eos_token_id", None))}
    if model.generation_config is not None:
        tokens.update(token_ids(model.generation_config.eos_token_id))
    texts: tuple[str, ...] = ()
    if chat:
        token, text = turn_end(tokenizer)
        tokens.update(token_ids(token))
        texts = (text,) if text else ()
    return Stop(frozenset(tokens), texts)
