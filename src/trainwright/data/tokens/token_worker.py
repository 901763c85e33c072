"""The code of a tokenization process, with few imports because every process pays for them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.tokenizer_calls import convert_panics
from trainwright.errors import RequestError

# The pattern of the ByteLevel pre-tokenizer, from GPT-2 (github.com/openai/gpt-2, src/encoder.py).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MAX_WORDS = 1_000_000
_CHECKED = 100_000  # characters
Encoded = tuple[bytes, list[int]]  # concatenated tokens of pieces, and the number of tokens of each


class WordTokens:
    """Encodes texts with a backend tokenizer, word by word if possible: for byte-level BPE, with a cache of words.

    A text has few different words, and the tokens of a word do not depend on its neighbors, so most words are looked
    up. This is about three times as fast as encoding the whole text. The tokens are the same, which is verified on the
    first text of a run.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        description = json.loads(tokenizer.to_str())
        self._pattern = _compile_pattern(description)
        self._added = [token["content"] for token in description["added_tokens"]]
        self._known: dict[str, list[int]] = {}
        self._checked = False

    def __call__(self, text: str) -> npt.NDArray[np.int64]:
        """Return the token ids of a text, without special tokens around it."""
        if self._pattern is not None and not self._checked:
            self._check(text[:_CHECKED])
        tokens = None if self._pattern is None else self._encode_by_words(text)
        return self._plain(text) if tokens is None else tokens

    def _plain(self, text: str) -> npt.NDArray[np.int64]:
        # The fast method computes no offsets, which are not needed here.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int64)

    def _check(self, text: str) -> None:
        tokens = self._encode_by_words(text)
        if tokens is not None:
            self._checked = True
            if not np.array_equal(tokens, self._plain(text)):
                self._pattern = None

    def _encode_by_words(self, text: str) -> npt.NDArray[np.int64] | None:
        """Return the token ids, or None if the text has added tokens or parts that the pattern does not match."""
        assert self._pattern is not None
        if any(token in text for token in self._added):
            return None
        words: list[str] = self._pattern.findall(text, concurrent=True)  # releases the GIL
        if sum(map(len, words)) != len(text):
            return None
        word_ids = self._known
        if missing := [word for word in set(words) if word not in word_ids]:
            if len(word_ids) > _MAX_WORDS:
                word_ids.clear()
                missing = list(set(words))
            encodings = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
            word_ids.update((word, encoding.ids) for word, encoding in zip(missing, encodings, strict=True))
        return np.fromiter(chain.from_iterable(map(word_ids.__getitem__, words)), dtype=np.int64)


def _compile_pattern(description: dict[str, Any]) -> Any:
    """Return the compiled word pattern, or None if the tokenizer is not byte-level BPE over words."""
    import regex

    model = description["model"]
    if description["normalizer"] is not None or model.get("type") != "BPE" or model.get("dropout"):
        return None
    steps = description["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    *cuts, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    expression = None
    if last.get("use_regex", True):
        expression = None if cuts else _GPT2
    elif [(cut.get("type"), cut.get("behavior"), cut.get("invert")) for cut in cuts] == [("Split", "Isolated", False)]:
        expression = cuts[0]["pattern"].get("Regex")
    if not isinstance(expression, str):
        return None
    try:
        pattern = regex.compile(expression)
    except regex.error:
        return None
    return None if pattern.groups else pattern


@dataclass(frozen=True)
class Settings:
    """``prefix``, ``suffix``: tokens around every document. ``ends``: texts after which there is no suffix.

    ``characters``: the vocabulary is single characters.
    """

    backend: str
    dtype: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    ends: tuple[str, ...]
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

        A document that was written with a template has its beginning and its end already, and gets no second one.

        Raises:
            RequestError: the vocabulary lacks a character, or the tokenizer fails.
        """
        if self._known is not None:
            for location, text, _, _ in pieces:
                if unknown := set(text) - self._known:
                    raise RequestError(f"{location}: the tokenizer has no token for {min(unknown)!r}")
        prefix, suffix = (np.asarray(ends, dtype=np.int64) for ends in (self._settings.prefix, self._settings.suffix))
        sequences, lengths = [], []
        for _, text, first, last in pieces:
            ended = last and text.rstrip().endswith(self._settings.ends)
            text = text.rstrip() if ended else text
            with convert_panics():
                piece_tokens = self._tokens(text)
            begins = first and not np.array_equal(piece_tokens[: len(prefix)], prefix)
            parts = [*([prefix] if begins else []), piece_tokens, *([suffix] if last and not ended else [])]
            sequences += parts
            lengths.append(sum(map(len, parts)))
        tokens: npt.NDArray[Any] = np.concatenate(sequences).astype(self._settings.dtype)
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
