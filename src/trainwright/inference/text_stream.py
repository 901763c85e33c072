"""Stream text token by token, without partial characters and without the beginning of a stop text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainwright.inference.stopping import Stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """Write the text that each token adds; ``close`` writes what was held back.

    Args:
        strip: omit leading white space.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Stop, write: Callable[[str], None], *, strip: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._write = write
        self._strip = strip
        self._tokens: list[int] = []
        self._written = 0

    def __call__(self, row: int, token: int) -> None:
        """Write the text of one more token."""
        self._tokens.append(token)
        text = self._text()
        held = max((_overlap(text, stop) for stop in self._stop.texts), default=0)
        # A byte of an incomplete character is decoded as U+FFFD.
        self._show(text[: len(text) - held].rstrip("\ufffd"))

    def close(self) -> None:
        """Write what was held back."""
        self._show(self._text())

    def _text(self) -> str:
        text = self._stop.before(str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)))
        return text.lstrip() if self._strip else text

    def _show(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
