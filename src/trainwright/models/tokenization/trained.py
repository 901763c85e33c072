"""Tokenizers trained on the user's text: characters, and byte-level BPE (Sennrich et al., arXiv 1508.07909).

A recipe names one as ``characters:SOURCE`` or ``bpe:SIZE:SOURCE``; it is built once and cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from trainwright.data.rows.texts import SEPARATOR, pieces
from trainwright.data.sources.shards import is_shards
from trainwright.errors import RequestError
from trainwright.machine.cache import cache_in_words, cache_root
from trainwright.machine.sharing.made_once import made_once
from trainwright.recipe.sections.data import SourceSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTES = 256
_VERSION = 1


def is_trained(name: str) -> bool:
    """Return whether a recipe's tokenizer name is one of these."""
    return name == "characters" or name.startswith(("characters:", "bpe:"))


def trained_tokenizer(name: str, key: str = "model.tokenizer") -> PreTrainedTokenizerFast:
    """Return the tokenizer ``characters:SOURCE`` or ``bpe:SIZE:SOURCE``, from the cache or newly built.

    Raises:
        RequestError: the name has another form, or the source is missing or not text.
        MachineError: the cache cannot be read or written.
    """
    from transformers import PreTrainedTokenizerFast

    from trainwright.data.sources.key import file_states

    size, source = _parsed(name, key)
    seen = json.dumps([_VERSION, size, file_states(source, key)], default=str)
    directory = cache_root() / "tokenizers" / hashlib.sha256(seen.encode()).hexdigest()[:32]

    def find() -> PreTrainedTokenizerFast | None:
        if not (directory / "tokenizer.json").exists():
            return None
        found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        return found

    with cache_in_words(directory):
        tokenizer = made_once(directory, find, lambda path: make_tokenizer([(source, key)], size).save_pretrained(path))
    tokenizer.name_or_path = name
    return tokenizer


def make_tokenizer(
    sources: Iterable[tuple[SourceSection, str]],
    size: int | None,
    report: Callable[[int], None] = lambda characters: None,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts: byte-level BPE with ``size`` tokens, or one token per character if ``size`` is None.

    Args:
        sources: pairs of a source and the key that names it in messages.
        report: called with the number of characters read so far.
    """

    def texts() -> Iterator[str]:
        done = 0
        for source, key in sources:
            for piece in pieces(source, key):
                yield piece.text
                done += len(piece.text)
                report(done)

    return _characters(texts()) if size is None else _bpe(texts(), size)


def _parsed(name: str, key: str) -> tuple[int | None, SourceSection]:
    kind, _, rest = name.partition(":")
    size: int | None = None
    if kind == "bpe":
        number, _, rest = rest.partition(":")
        if not number.isdigit() or int(number) <= _BYTES:
            raise RequestError(f"{key}: {name}: bpe:SIZE:SOURCE has a size of more than {_BYTES} tokens")
        size = int(number)
    if not rest:
        raise RequestError(f"{key}: {name}: needs a text to train on; use {name.rstrip(':')}:FILE")
    if is_shards(rest):
        raise RequestError(
            f"{key}: {name}: {rest} is already tokenized; use the original text, or the tokenizer's directory"
        )
    return size, SourceSection(source=rest)


def _characters(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose only tokens are the characters of the texts, sorted by code point."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    found: set[str] = set()
    for text in texts:
        found.update(text)
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(found))}, merges=[]))
    backend.decoder = decoders.Fuse()
    # This setting makes unknown characters an error; otherwise they would be dropped.
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, characters=True)


def _bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer with the word pattern and the end-of-text token of GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SEPARATOR, pad_token=SEPARATOR, clean_up_tokenization_spaces=False
    )
