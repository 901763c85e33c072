"""Calls of a tokenizer that end: in words where it fails, and after a time where it does not end by itself.

The pattern that a tokenizer cuts text by comes with the model. One whose search backtracks without end is stopped by
the library after ten million steps of one match, by a Rust panic, which Python sees as an exception that is no
``Exception``; below that it may take that long at every character.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
# Of computing by this process: a minute, and the time of the slowest tokenizer, far below what any takes.
SECONDS = 60.0
_CHARACTERS_A_SECOND = 20_000
_LOOK = 0.2


class TokenizerError(RequestError):
    """The tokenizer itself fails, whatever the row."""


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any) -> Any:
    """``tokenizer(texts, **options)``. Raises TokenizerError as ``bounded``."""
    name = os.path.basename(str(tokenizer.name_or_path).rstrip("/"))
    many = list(texts)
    return bounded(f"the tokenizer {name}".strip(), sum(map(len, many)), lambda: tokenizer(many, **options))


def bounded(name: str, characters: int, call: Callable[[], T]) -> T:
    """Return what ``call`` of a tokenizer returns for a text of so many characters.

    It must release the interpreter while it computes, as ``encode_batch`` does.

    Args:
        name: of the tokenizer, for messages.

    Raises:
        TokenizerError: it panics, or computes for too long.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # a panic is no Exception
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)  # nobody waits for it at the end
    limit = SECONDS + characters / _CHARACTERS_A_SECOND
    begun = time.process_time()
    thread.start()
    thread.join(_LOOK)
    while thread.is_alive():
        if time.process_time() - begun > limit:
            raise TokenizerError(
                f"{name} takes more than {limit:.0f} s of computing for {characters:,} characters; the "
                "pattern that it cuts text by may never end (pre_tokenizer in tokenizer.json); use another tokenizer"
            )
        thread.join(_LOOK)
    value, error = outcome[0]
    if error is None:
        return value  # type: ignore[return-value]
    if type(error).__name__ == "PanicException":
        raise TokenizerError(
            f"{name} fails: {error}; the pattern that it cuts text by may be at fault (pre_tokenizer in "
            "tokenizer.json); use another tokenizer"
        ) from None
    raise error
