"""A conversation at the terminal, turn by turn, with answers shown as they are generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import Message
from trainwright.errors import RequestError
from trainwright.inference.generation import Answer, Sampling, Stop, answer_batch, stop_of
from trainwright.inference.loading import Loaded
from trainwright.inference.prompts import PromptEncoder, Question
from trainwright.utils.text import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELP = "/reset starts a new conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


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
        text = self._decode_text()
        overlap = max((_count_overlap(text, stop) for stop in self._stop.texts), default=0)
        # A byte of an incomplete character is decoded as U+FFFD.
        self._show(text[: len(text) - overlap].rstrip("\ufffd"))

    def close(self) -> None:
        """Write what was held back."""
        self._show(self._decode_text())

    def _decode_text(self) -> str:
        text = self._stop.before(str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)))
        return text.lstrip() if self._strip else text

    def _show(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def _count_overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class ChatSession:
    """Answer questions one at a time, and write the answers as they are generated.

    Args:
        plain: whether the model continues texts.
        write: called with every piece of an answer.
    """

    def __init__(
        self,
        loaded: Loaded,
        sampling: Sampling,
        write: Callable[[str], None],
        *,
        plain: bool,
        system: str | None = None,
    ) -> None:
        self.encode = PromptEncoder(loaded.tokenizer, plain=plain, system=system)
        self._loaded = loaded
        self._sampling = sampling
        self._write = write
        self._plain = plain
        self._stop = stop_of(loaded.lm.model, loaded.tokenizer, chat=not plain)
        self._answers_given = 0

    def answer(self, question: Question) -> Answer:
        """Generate and write an answer. The sampling of the n-th answer depends on the seed and n.

        Raises:
            RequestError: the template rejects the conversation, or it leaves no position for an answer.
            KeyboardInterrupt: with the answer so far as its argument.
        """
        tokenizer = self._loaded.tokenizer
        prompt = self.encode(question)
        stream = TextStream(tokenizer, self._stop, self._write, strip=not self._plain)
        tokens: list[int] = []

        def heard(row: int, token: int) -> None:
            tokens.append(token)
            stream(row, token)

        number, self._answers_given = self._answers_given, self._answers_given + 1
        try:
            with self._loaded.lm.open_for_generation() as model:
                answers = answer_batch(
                    model, tokenizer, [prompt], self._sampling, self._stop, examples=[number], on_token=heard
                )
        except KeyboardInterrupt:
            text = self._stop.before(str(tokenizer.decode(tokens, skip_special_tokens=True)))
            raise KeyboardInterrupt(text) from None
        stream.close()
        return answers[0]


def chat(session: ChatSession, lines: Iterator[str], write: Callable[[str], None]) -> None:
    """Answer every line in the context of all earlier ones, until there are no more.

    Args:
        lines: the user's input; a KeyboardInterrupt in it ends the conversation.
        write: called with line breaks and remarks between the answers.
    """
    conversation: list[Message] = []
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation = []
            write("new conversation\n")
            continue
        if not text:
            continue
        conversation.append({"role": "user", "content": text})
        try:
            text = session.answer(conversation).text
        except KeyboardInterrupt as stopped:
            text = str(stopped)
        except RequestError as error:
            write(f"{error}; /reset starts a new conversation\n")
            conversation.pop()
            continue
        write("\n")
        conversation.append({"role": "assistant", "content": text.strip()})


def read_lines(prompt: str) -> Iterator[str]:
    """Yield lines from standard input, with ``prompt`` before each if it is a terminal; ctrl-D or ctrl-C ends them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 (gives input() its line editing)

    while True:
        try:
            yield input(prompt)
        except (EOFError, KeyboardInterrupt):
            say()
            return
