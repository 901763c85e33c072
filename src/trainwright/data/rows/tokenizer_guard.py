"""Bound calls of tokenizers and chat templates: turn failures into errors, and give up calls that take too long.

The pre-tokenization pattern comes with the model. If its search backtracks too much, the library stops after ten
million steps of one match with a Rust panic, an exception that is not an ``Exception`` in Python; below that limit,
each character may take that long. A chat template comes with the model too, and may have loops of any length.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.data.rows.formats import TurnsError
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
# Limits on the processor time of this process: a minute plus time per character, at a rate that every tokenizer and
# template exceeds by far.
SECONDS = 60.0
_CHARACTERS_A_SECOND = 20_000
_LOOK = 0.2
_PATTERN = "its regular expression may never end (pre_tokenizer in tokenizer.json); use another tokenizer"


class TokenizerError(RequestError):
    """The tokenizer or its chat template itself fails, independent of the row."""


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> Any:
    """Return ``tokenizer(texts, **options)``; raise TokenizerError as ``bounded``.

    Raises:
        TurnsError: a tokenizer of characters lacks one of a text. It would drop it, and count offsets without it.
    """
    name = os.path.basename(str(tokenizer.name_or_path).rstrip("/"))
    many = list(texts)
    if tokenizer.init_kwargs.get("characters"):
        known = tokenizer.get_vocab().keys()
        for index, text in enumerate(many):
            if unknown := set(text) - known:
                raise TurnsError(
                    f"the tokenizer has no token for {min(unknown)!r}, of the text or of the chat template around it; "
                    "set model.tokenizer to bytes, bpe:SIZE:SOURCE, or characters:FILE of a text that has it",
                    index,
                )
    return bounded(f"the tokenizer {name}".strip(), sum(map(len, many)), lambda: tokenizer(many, **options))


def bounded(name: str, characters: int, call: Callable[[], T], why: str = _PATTERN) -> T:
    """Return the result of ``call`` of a tokenizer or template on a text of ``characters`` characters.

    It must release the GIL now and then while it computes, as ``encode_batch`` and Python's own loops do.

    Args:
        name: of the tokenizer or template, for messages.
        why: the likely reason for a call that takes too long, and the remedy.

    Raises:
        TokenizerError: the tokenizer panics, or the call takes too long.
    """
    thread = _idle_thread()
    limit = SECONDS + characters / _CHARACTERS_A_SECOND
    started_at = time.process_time()
    thread.calls.put(call)
    while True:
        try:
            value, error = thread.outcomes.get(timeout=_LOOK)
            break
        except queue.Empty:
            if time.process_time() - started_at > limit:
                thread.calls.put(None)  # ends if the call ever does
                raise TokenizerError(
                    f"{name} takes more than {limit:.0f} s of CPU time for {characters:,} characters; {why}"
                ) from None
    _threads.idle = thread
    if error is None:
        return value
    if type(error).__name__ == "PanicException":
        raise TokenizerError(
            f"{name} fails: {error}; check its regular expression (pre_tokenizer in tokenizer.json); use another "
            "tokenizer"
        ) from None
    raise error


class _CallingThread(threading.Thread):
    """Runs calls one after the other, until it gets None.

    One thread for all calls, because glibc may give every new thread an arena of its own, whose memory it keeps.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)  # not joined at exit
        self.process = os.getpid()
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.outcomes.put((call(), None))
            except BaseException as error:  # a panic is not an Exception
                self.outcomes.put((None, error))
            del call  # what it refers to is not kept until the next call


class _Threads(threading.local):
    """For each thread, the one that made its last call, unless that call was given up."""

    idle: _CallingThread | None = None


_threads = _Threads()


def _idle_thread() -> _CallingThread:
    """Return the idle thread, or start one at the first call, in a forked process, and after a call was given up."""
    thread, _threads.idle = _threads.idle, None
    if thread is None or thread.process != os.getpid():
        thread = _CallingThread()
        thread.start()
    return thread


def unknown_token(token: int, tokenizer: PreTrainedTokenizerBase, embeddings: int | None) -> str | None:
    """Return a message if a model with this number of embeddings has none for ``token``."""
    if embeddings is None or token < embeddings:
        return None
    return (
        f"has the token {tokenizer.convert_ids_to_tokens(token)!r} (id {token:,}), but the model has only "
        f"{embeddings:,} embeddings; remove it from the rows, or set model.tokenizer to the tokenizer of the model"
    )
