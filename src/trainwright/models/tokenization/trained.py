"""Tokenizers made from one's own text: one token a character, and byte-level BPE (Sennrich et al., arXiv 1508.07909).

A recipe names one as ``characters:SOURCE`` or ``bpe:SIZE:SOURCE``; it is made once and kept in the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from trainwright.data.sources.texts import SEPARATOR, pieces
from trainwright.data.tokens.shards import is_shards
from trainwright.errors import RequestError
from trainwright.machine.cache import cache_root
from trainwright.models.files.save import replacing
from trainwright.recipe.sections.data import SourceSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTES = 256
_VERSION = 1


def is_trained(name: str) -> bool:
    """Whether a recipe's tokenizer is one of these."""
    return name == "characters" or name.startswith(("characters:", "bpe:"))


def trained_tokenizer(name: str, key: str = "model.tokenizer") -> PreTrainedTokenizerFast:
    """Return the tokenizer ``characters:SOURCE`` or ``bpe:SIZE:SOURCE``, from the cache or made now.

    Raises:
        RequestError: it is named in another way, or the source is not there or no text.
    """
    from filelock import FileLock
    from transformers import PreTrainedTokenizerFast

    from trainwright.data.sources.key import look

    size, source = _parsed(name, key)
    seen = json.dumps([_VERSION, size, look(source, key)], default=str)
    directory = cache_root() / "tokenizers" / hashlib.sha256(seen.encode()).hexdigest()[:32]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):
        if not directory.exists():
            made = make_tokenizer([(source, key)], size)
            with replacing(directory) as scratch:
                made.save_pretrained(scratch)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    tokenizer.name_or_path = name
    return tokenizer


def make_tokenizer(
    sources: Iterable[tuple[SourceSection, str]],
    size: int | None,
    report: Callable[[int], None] = lambda characters: None,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of some texts: with ``size``, byte-level BPE of so many tokens; without, a token a character.

    Args:
        sources: with the key that names each in messages.
        report: called with the characters that were read so far.
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
        raise RequestError(f"{key}: {name}: names no text to be made from; write {name.rstrip(':')}:FILE")
    if is_shards(rest):
        raise RequestError(f"{key}: {name}: {rest} is tokenised already; name its text, or the tokenizer's directory")
    return size, SourceSection(source=rest)


def _characters(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return the characters that there are, in the order of their code points; no other token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    found: set[str] = set()
    for text in texts:
        found.update(text)
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(found))}, merges=[]))
    backend.decoder = decoders.Fuse()
    # That a text with other characters is refused, and not shortened, hangs on this mark.
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, characters=True)


def _bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """GPT-2's way of cutting text into words, and its end-of-text token."""
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
