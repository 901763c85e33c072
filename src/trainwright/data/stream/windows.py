"""Examples of one context length from token shards: windows of documents, or of the stream of all tokens.

An example has n + 1 tokens: the first n are the model's input and the last n the targets. The next example starts with
the last token of this one, so every token but the first is predicted once. ``documents``: no example crosses a document
boundary. ``contiguous``: documents are concatenated with the end-of-text token between them, as in the training of
GPT-2.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.check import check_shard_tokens
from trainwright.data.rows.texts import VERSION
from trainwright.data.sources.shards import Shards, fingerprint_tokenizer, is_shards
from trainwright.data.stream.batch import Batch, build_flat_layout, build_padded_layout
from trainwright.data.stream.dataset_cache import (
    CANNOT_STORE,
    build_mixture,
    compute_validation_sizes,
    describe_mixture,
)
from trainwright.data.stream.stream import MicroBatch
from trainwright.data.tokens.dataset import MixturePart, TokenDataset
from trainwright.errors import RequestError
from trainwright.machine.cache import explain_cache_errors
from trainwright.machine.detect import detect
from trainwright.machine.sharing import build_once
from trainwright.recipe.sections.data import SourceSection
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.schema import RecipeSchema


Indices = npt.NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int64)
_REMEMBERED = 4096  # usually the examples of two global batches


@dataclass(frozen=True)
class Spans:
    """Token ranges of ``shards``, from ``begins`` to ``ends``, each of which is divided into windows separately."""

    shards: Shards
    begins: Indices
    ends: Indices
    length: int  # most targets per window

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all spans."""
        return int((self.ends - self.begins).sum())

    def counts(self) -> Indices:
        """Return the number of windows of each span; a span of one token has none."""
        counts: Indices = -(-(self.ends - self.begins - 1) // self.length)
        return counts


@dataclass(frozen=True)
class WindowDataset(TokenDataset):
    """A dataset of windows of several corpora; the tokens stay in the shards.

    Lengths and counts of an example cover its n input tokens, which equals the number of targets.
    """

    parts: tuple[Spans, ...] = ()
    # Finds the tokens of an example; cached because it is called several times per step.
    _place: Callable[[int], tuple[Shards, int, int]] = field(init=False, repr=False)
    # Over the spans of all parts: the number of windows before each.
    _before: Indices = field(init=False, repr=False, default_factory=lambda: _NONE)
    _first: Indices = field(init=False, repr=False, default_factory=lambda: _NONE)  # index of each part's first span

    @classmethod
    def of(cls, parts: Sequence[Spans], mixture: tuple[MixturePart, ...] | None) -> WindowDataset:
        """Return a dataset of the windows of several corpora, sampled by the shares in ``mixture``."""
        empty_arrays = {"tokens": _NONE.astype(np.int32), "targets": _NONE.astype(np.bool_), "offsets": _NONE}
        about = {"fingerprint": fingerprint_spans(parts, mixture), "report": {"format": "text"}, "mixture": mixture}
        return cls(**empty_arrays, **about, parts=tuple(parts))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        counts = [part.counts() for part in self.parts]
        object.__setattr__(self, "_before", np.concatenate([[0], np.cumsum(np.concatenate(counts))]))
        object.__setattr__(self, "_first", np.cumsum([0, *map(len, counts)]))
        object.__setattr__(self, "_place", lru_cache(_REMEMBERED)(self._find))

    def __len__(self) -> int:
        return int(self._before[-1])

    @property
    def token_count(self) -> int:
        """Return the number of input tokens of all examples."""
        return int(self.example_lengths().sum())

    def _find(self, index: int) -> tuple[Shards, int, int]:
        stretch = int(self._before.searchsorted(index, side="right")) - 1
        number = int(self._first.searchsorted(stretch, side="right")) - 1
        part = self.parts[number]
        span_index = stretch - int(self._first[number])
        begin = int(part.begins[span_index]) + (index - int(self._before[stretch])) * part.length
        return part.shards, begin, min(begin + part.length + 1, int(part.ends[span_index]))

    def sequence(self, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return ``(tokens [n + 1], targets [n + 1])`` of an example; all tokens but the first are targets."""
        shards, begin, end = self._place(sequence)
        targets = np.ones(end - begin, dtype=np.bool_)
        targets[0] = False
        return shards.read(begin, end), targets

    def sequence_length(self, sequence: int) -> int:
        """Return the number of tokens of one sequence."""
        _, begin, end = self._place(sequence)
        return end - begin - 1

    def sequence_targets(self, sequence: int) -> int:
        """Return the number of targets of one sequence."""
        return self.sequence_length(sequence)

    def example_lengths(self) -> Indices:
        """Return the length of every example."""
        lengths = []
        for part in self.parts:
            counts, size = part.counts(), part.length
            part_lengths = np.full(int(counts.sum()), size, dtype=np.int64)
            some = counts > 0
            last = np.cumsum(counts[some]) - 1
            part_lengths[last] = (part.ends - part.begins - 1)[some] - (counts[some] - 1) * size
            lengths.append(part_lengths)
        return np.concatenate(lengths)

    def target_fraction(self, examples: object = None) -> float:
        """Return the fraction of input tokens that are predicted, of all or of some examples."""
        return 1.0

    def will_need(self, examples: Iterable[int]) -> None:
        """Ask the operating system to read examples ahead."""
        for example in examples:
            shards, begin, end = self._place(example)
            shards.will_need(begin, end)


def collate_windows(dataset: TokenDataset, micro: MicroBatch, *, packed: bool, pad_token_id: int) -> Batch:
    """Collate one micro-batch into tensors; the last token of a sequence is only a target."""
    examples = [(example, dataset.sequence(example)[0]) for example in micro.examples]
    length = micro.max_length or max(len(ids) - 1 for _, ids in examples)
    cuts = [(example, ids, begin) for example, ids in examples for begin in range(0, len(ids) - 1, length)]
    tokens = [ids[begin : begin + length + 1] for _, ids, begin in cuts]
    pairs = [(ids[:-1], np.ones(len(ids) - 1, dtype=np.bool_)) for ids in tokens]
    lengths = [len(ids) for ids, _ in pairs]
    layout = build_flat_layout(pairs, lengths) if packed else build_padded_layout(pairs, lengths, pad_token_id)
    input_ids, position_ids, flags, mask = layout
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        lengths=tuple(lengths),
        boundaries=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)) if packed else None,
        attention_mask=None if mask is None else torch.from_numpy(mask),
        target_index=torch.from_numpy(np.flatnonzero(flags.reshape(-1))),
        targets=torch.from_numpy(np.concatenate([ids[1:] for ids in tokens]).astype(np.int64)),
        longest=max(lengths),
        tokens=sum(lengths),
        weight=micro.weight,
        examples=micro.examples,
        sequences=tuple(example for example, _, _ in cuts),
        roles=(0,) * len(lengths),
        target_counts=tuple(lengths),
    )


def build_whole_spans(shards: Shards, length: int, *, contiguous: bool) -> Spans:
    """Return all tokens of a corpus as spans."""
    if contiguous:
        return _build_spans(shards, 0, shards.token_count, length)
    begins = np.concatenate([np.zeros(1, np.int64), shards.ends[:-1]])
    return Spans(shards, begins, shards.ends, length)


def split_spans(
    shards: Shards, length: int, validation: float | int, seed: int, *, contiguous: bool, key: str
) -> tuple[Spans, Spans]:
    """Split a corpus into training and validation spans: its end if contiguous, else random documents without overlap.

    Args:
        validation: a fraction, or a number of documents (of windows if contiguous).

    Raises:
        RequestError: one side would be empty.
    """
    if contiguous:
        total = shards.token_count
        size = round(validation * total) if isinstance(validation, float) else validation * length
        if not 2 <= size <= total - 2:
            raise RequestError(
                f"data.validation: {validation} of the {total:,} tokens of {key} leaves too few tokens for training "
                "or validation; change it, or set it to null"
            )
        return _build_spans(shards, 0, total - size, length), _build_spans(shards, total - size, total, length)
    in_validation = _choose_held_out(shards.digests, validation, seed, key)
    corpus = build_whole_spans(shards, length, contiguous=False)
    sides = [Spans(shards, corpus.begins[side], corpus.ends[side], length) for side in (~in_validation, in_validation)]
    return sides[0], sides[1]


def fingerprint_spans(parts: Sequence[Spans], mixture: tuple[MixturePart, ...] | None) -> str:
    """Return a hash of the tokens and their division into windows, independent of file paths."""
    digest = hashlib.sha256(repr(mixture).encode())
    for part in parts:
        digest.update(f"{part.shards.fingerprint}/{part.length}/".encode())
        digest.update(part.begins.tobytes())
    return digest.hexdigest()[:32]


def _build_spans(shards: Shards, begin: int, end: int, length: int) -> Spans:
    return Spans(shards, np.asarray([begin], dtype=np.int64), np.asarray([end], dtype=np.int64), length)


def _choose_held_out(
    digests: npt.NDArray[np.uint64], validation: float | int, seed: int, key: str
) -> npt.NDArray[np.bool_]:
    """Return which documents are held out: the first in an order determined by the seed and their tokens."""
    total = len(digests)
    count = max(1, round(validation * total)) if isinstance(validation, float) else int(validation)
    if count >= total:
        raise RequestError(
            f"data.validation: {validation} of the {total:,} documents of {key} leaves none for training; lower it, "
            "set it to null, or set pretrain.windows to contiguous, which holds out the end of the text"
        )
    ranks = _mix_digests(digests, seed)
    order = np.argsort(ranks, kind="stable")
    # Equal documents stay together, on the training side.
    border = ranks[order[count]]
    in_validation = ranks < border
    if not in_validation.any():
        raise RequestError(f"data.validation: the documents of {key} are too similar to hold any out; set it to null")
    return in_validation


def _mix_digests(digests: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Mix the digests with the seed (splitmix64 finalizer, Steele et al., OOPSLA 2014)."""
    salt = int.from_bytes(hashlib.sha256(f"{seed}/held back".encode()).digest()[:8], "little")
    mixed_digests = digests ^ np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed_digests = (mixed_digests ^ (mixed_digests >> np.uint64(shift))) * np.uint64(factor)
    return mixed_digests ^ (mixed_digests >> np.uint64(31))


def prepare_windows(
    recipe: RecipeSchema,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    embeddings: int | None = None,
    *,
    contiguous: bool,
) -> tuple[WindowDataset, WindowDataset | None, list[str], dict[str, int]]:
    """Return the training dataset, the validation dataset or None, lines of text about them, and the number of windows
    of each validation set, if they have names.

    Args:
        embeddings: of the model.
        contiguous: windows span concatenated documents; otherwise each is within one document.

    Raises:
        RequestError: a source is wrong, shards are of another tokenizer or have tokens that the model has no embedding
            for, or one side would be empty.
        MachineError: the cache cannot be written.
    """
    data = recipe.data
    all_shards = [_open_shards(source, key, tokenizer, cache) for source, key in data.keyed_sources]
    corpora = all_shards[: len(data.sources)]
    spans = [build_whole_spans(corpus, data.max_length, contiguous=contiguous) for corpus in all_shards]
    train, separate = spans[: len(corpora)], iter(spans[len(corpora) :])
    held_out: list[Spans] = []
    if data.held_out is not None:
        train, sizes = [], compute_validation_sizes(data, [corpus.token_count for corpus in corpora])
        for corpus, share, key in zip(corpora, sizes, data.source_keys, strict=True):
            size = share if isinstance(share, float) else max(1, share or 0)
            part, aside = split_spans(corpus, data.max_length, size, recipe.train.seed, contiguous=contiguous, key=key)
            train.append(part)
            held_out.append(aside)
    sets = {
        name: [next(separate)] if isinstance(rows, SourceSection) else held_out
        for name, rows in data.validation_sets.items()
    }
    validation_spans = [part for parts in sets.values() for part in parts]
    for shards in all_shards:
        if wrong := check_shard_tokens(shards, tokenizer, embeddings):
            raise RequestError(wrong)
    mixture = None
    lines = [line for corpus in corpora for line in (_describe_corpus(corpus), *corpus.about.get("notes", ()))]
    if len(train) > 1:
        windows = [int(part.counts().sum()) for part in train]
        if not all(windows):
            raise RequestError(f"{data.source_keys[windows.index(0)]}: no tokens to predict")
        mixture = build_mixture(data, windows)
        lines += describe_mixture(data, mixture)
    validation_dataset = WindowDataset.of(validation_spans, None) if validation_spans else None
    datasets = WindowDataset.of(train, mixture), validation_dataset
    for dataset, key in zip(datasets, ("data.train", "data.validation"), strict=True):
        if dataset is not None and not len(dataset):
            raise RequestError(f"{key}: no tokens to predict; it has no document of at least two tokens")
    set_sizes = {name: sum(int(part.counts().sum()) for part in parts) for name, parts in sets.items() if name}
    for name, count in set_sizes.items():
        if not count:
            raise RequestError(f"data.validation.{name}: no tokens to predict")
    if set_sizes:
        lines.append("validation sets: " + ", ".join(f"{count:,} of {name}" for name, count in set_sizes.items()))
    return *datasets, [*lines, _split_line(*datasets, contiguous)], set_sizes


def _open_shards(source: SourceSection, key: str, tokenizer: PreTrainedTokenizerBase, cache: Path) -> Shards:
    """Open the shards of a source, or build them in the cache if they are not there yet."""
    if is_shards(source.source):
        if source.limit is not None:
            raise RequestError(
                f"{key}.limit: is not supported for token shards; remove it, or tokenize fewer documents"
            )
        shards = Shards.open(expand_user_path(source.source), key)
        shards.check_tokenizer(tokenizer, key)
        return shards
    identity = build_identity([(source, key)])
    task = hashlib.sha256(json.dumps([identity, fingerprint_tokenizer(tokenizer)], default=str).encode()).hexdigest()
    directory = cache / "shards" / task[:32]

    def find() -> Shards | None:
        try:
            return Shards.open(directory, key) if (directory / "shards.json").is_file() else None
        except RequestError as damaged:
            if isinstance(damaged.__cause__, OSError):  # it cannot be read now
                raise damaged.__cause__ from None
            return None

    def make(path: Path) -> None:
        from trainwright.data.tokens.shard_writer import tokenize

        begin_activity(f"tokenizing {source.source}")
        processes = max(1, detect().cpu_cores - 1)
        tokenize([(source, key)], tokenizer, path, identity=identity, processes=processes)

    with explain_cache_errors(directory, CANNOT_STORE):
        return build_once(directory, find, make, goes_on=True)


def build_identity(sources: Sequence[tuple[SourceSection, str]]) -> list[Any]:
    """Return a value that changes whenever the sources or their content change, without reading them."""
    from trainwright.data.sources.key import list_row_changes, read_file_states

    settings = ([source.format, source.limit, *list_row_changes(source)] for source, _ in sources)
    return [VERSION, *([read_file_states(*pair), *values] for pair, values in zip(sources, settings, strict=True))]


def _describe_corpus(corpus: Shards) -> str:
    about = corpus.about
    documents = format_plural(about["documents"], "document")
    return (
        f"{about['source']}: {about['tokens']:,} tokens ({about['dtype']}) in {documents}, "
        f"{about['characters'] / max(1, about['tokens']):.2f} characters per token, in {corpus.directory}"
    )


def _split_line(train: WindowDataset, validation: WindowDataset | None, contiguous: bool) -> str:
    unit = "contiguous windows" if contiguous else "windows of documents"
    line = f"{len(train):,} {unit} ({format_plural(train.token_count, 'token')}) to train on"
    if validation is None:
        return f"{line}, none for validation"
    return f"{line}, {len(validation):,} ({format_plural(validation.token_count, 'token')}) for validation"
