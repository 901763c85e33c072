"""The code of a tokenization process, with few imports because every process pays for them."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.bounded import bounded
from trainwright.data.tokens.word_tokens import WordTokens
from trainwright.errors import RequestError

Encoded = tuple[bytes, list[int]]  # concatenated tokens of pieces, and the number of tokens of each


@dataclass(frozen=True)
class Settings:
    """``prefix``, ``suffix``: tokens around every document. ``characters``: the vocabulary is single characters."""

    backend: str
    dtype: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    characters: bool


class Encoder:
    """Tokenizes pieces of documents."""

    def __init__(self, settings: Settings) -> None:
        from tokenizers import Tokenizer

        self._settings = settings
        tokenizer: Any = Tokenizer.from_str(settings.backend)
        self._tokens = WordTokens(tokenizer)
        self._known = set(tokenizer.get_vocab()) if settings.characters else None

    def __call__(self, pieces: Sequence[tuple[str, str, bool, bool]]) -> Encoded:
        """Return the tokens of pieces ``(place, text, first, last)``.

        Raises:
            RequestError: the vocabulary lacks a character, or the tokenizer fails.
        """
        if self._known is not None:
            for place, text, _, _ in pieces:
                if unknown := set(text) - self._known:
                    raise RequestError(f"{place}: the tokenizer has no token for {min(unknown)!r}")
        prefix, suffix = (np.asarray(ends, dtype=np.int64) for ends in (self._settings.prefix, self._settings.suffix))
        found, lengths = [], []
        for _, text, first, last in pieces:
            own = bounded("the tokenizer", len(text), functools.partial(self._tokens, text))
            parts = [*([prefix] if first else []), own, *([suffix] if last else [])]
            found += parts
            lengths.append(sum(map(len, parts)))
        tokens: npt.NDArray[Any] = np.concatenate(found).astype(self._settings.dtype)
        return tokens.tobytes(), lengths


def work(settings: Settings, pipe: Connection) -> None:
    """Reply to chunks of pieces with their tokens, or with an error, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core
    encoder = Encoder(settings)
    with suppress(EOFError, ConnectionError):
        while True:
            try:
                answer: Encoded | Exception = encoder(pipe.recv())
            except RequestError as error:
                answer = error
            pipe.send(answer)
