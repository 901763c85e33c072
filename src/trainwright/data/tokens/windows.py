"""Token shards as examples of one context each: windows of documents, or of the stream of all tokens.

An example is n + 1 tokens, of which the first n go into the model and the last n are predicted; the next one begins
with the last token of this one, so every token but the first is predicted once. ``documents``: no example has tokens of
two documents. ``contiguous``: documents follow each other with the end-of-text token between them, as GPT-2 learnt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.stream.batch import Batch, flat_layout, padded_layout
from trainwright.data.stream.dataset import TokenDataset
from trainwright.data.stream.mixture import Part
from trainwright.data.stream.stream import MicroBatch
from trainwright.data.tokens.shards import Shards
from trainwright.errors import RequestError

Indices = npt.NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int64)
_REMEMBERED = 4096  # examples: those of a global batch and of the next, as a rule


@dataclass(frozen=True)
class Spans:
    """Stretches of the tokens of ``shards`` that windows are cut from, each for itself: from ``begins`` to ``ends``."""

    shards: Shards
    begins: Indices
    ends: Indices
    length: int  # targets of a window at most

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all spans."""
        return int((self.ends - self.begins).sum())

    def counts(self) -> Indices:
        """Windows of each stretch; one of a single token has nothing to predict."""
        counts: Indices = -(-(self.ends - self.begins - 1) // self.length)
        return counts


@dataclass(frozen=True)
class WindowDataset(TokenDataset):
    """Windows of several corpora, one after another; a dataset whose tokens stay where they are.

    ``length`` and what is counted of an example are of what goes into the model, which is also what is predicted.
    """

    parts: tuple[Spans, ...] = ()
    # Where the tokens of an example are; asked for several times a step.
    _place: Callable[[int], tuple[Shards, int, int]] = field(init=False, repr=False)
    # Of the stretches of all parts together: how many windows are before each, and where it begins and ends.
    _before: Indices = field(init=False, repr=False, default_factory=lambda: _NONE)
    _first: Indices = field(init=False, repr=False, default_factory=lambda: _NONE)  # of each part: its first stretch

    @classmethod
    def of(cls, parts: Sequence[Spans], mixture: tuple[Part, ...] | None) -> WindowDataset:
        """Return a dataset of the windows of some corpora, of which an epoch sees what ``mixture`` says."""
        nothing = {"tokens": _NONE.astype(np.int32), "targets": _NONE.astype(np.bool_), "offsets": _NONE}
        about = {"fingerprint": fingerprint_of(parts, mixture), "report": {"format": "text"}, "mixture": mixture}
        return cls(**nothing, **about, parts=tuple(parts))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        counts = [part.counts() for part in self.parts]
        object.__setattr__(self, "_before", np.concatenate([[0], np.cumsum(np.concatenate(counts))]))
        object.__setattr__(self, "_first", np.cumsum([0, *map(len, counts)]))
        object.__setattr__(self, "_place", lru_cache(_REMEMBERED)(self._find))

    def __len__(self) -> int:
        return int(self._before[-1])

    @property
    def token_count(self) -> int:
        """Of all examples what goes into the model."""
        return int(self.example_lengths().sum())

    def _find(self, index: int) -> tuple[Shards, int, int]:
        stretch = int(self._before.searchsorted(index, side="right")) - 1
        number = int(self._first.searchsorted(stretch, side="right")) - 1
        part = self.parts[number]
        own = stretch - int(self._first[number])
        begin = int(part.begins[own]) + (index - int(self._before[stretch])) * part.length
        return part.shards, begin, min(begin + part.length + 1, int(part.ends[own]))

    def document(self, document: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """``(tokens [n + 1], targets [n + 1])`` of an example: all but the first are predicted."""
        shards, begin, end = self._place(document)
        targets = np.ones(end - begin, dtype=np.bool_)
        targets[0] = False
        return shards.read(begin, end), targets

    def document_length(self, document: int) -> int:
        """Return the number of tokens of one document."""
        _, begin, end = self._place(document)
        return end - begin - 1

    def document_targets(self, document: int) -> int:
        """Return the number of targets of one document."""
        return self.document_length(document)

    def example_lengths(self) -> Indices:
        """Return the length of every example."""
        lengths = []
        for part in self.parts:
            counts, size = part.counts(), part.length
            each = np.full(int(counts.sum()), size, dtype=np.int64)
            some = counts > 0
            last = np.cumsum(counts[some]) - 1
            each[last] = (part.ends - part.begins - 1)[some] - (counts[some] - 1) * size
            lengths.append(each)
        return np.concatenate(lengths)

    def target_fraction(self) -> float:
        """Of what goes into the model, how much is predicted."""
        return 1.0

    def will_need(self, examples: Iterable[int]) -> None:
        """Have the system read examples ahead."""
        for example in examples:
            shards, begin, end = self._place(example)
            shards.will_need(begin, end)


def collate_windows(dataset: WindowDataset, micro: MicroBatch, *, packed: bool, pad_token_id: int) -> Batch:
    """Tensors of one micro-batch: the last token of an example is predicted only."""
    tokens = [dataset.document(example)[0] for example in micro.examples]
    pairs = [(ids[:-1], np.ones(len(ids) - 1, dtype=np.bool_)) for ids in tokens]
    lengths = [len(ids) for ids, _ in pairs]
    layout = flat_layout(pairs, lengths) if packed else padded_layout(pairs, lengths, pad_token_id)
    input_ids, position_ids, flags, mask = layout
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        boundaries=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)) if packed else None,
        attention_mask=None if mask is None else torch.from_numpy(mask),
        target_index=torch.from_numpy(np.flatnonzero(flags.reshape(-1))),
        targets=torch.from_numpy(np.concatenate([ids[1:] for ids in tokens]).astype(np.int64)),
        longest=max(lengths),
        tokens=sum(lengths),
        weight=micro.weight,
        examples=micro.examples,
        documents=micro.examples,
        roles=(0,) * len(lengths),
        target_counts=tuple(lengths),
    )


def everything(shards: Shards, length: int, *, contiguous: bool) -> Spans:
    """All of a corpus."""
    if contiguous:
        return _stream(shards, 0, shards.token_count, length)
    begins = np.concatenate([np.zeros(1, np.int64), shards.ends[:-1]])
    return Spans(shards, begins, shards.ends, length)


def divided(
    shards: Shards, length: int, validation: float | int, seed: int, *, contiguous: bool, key: str
) -> tuple[Spans, Spans]:
    """Return what is trained on and what is held back: of a stream its end, else documents, equal ones on one side.

    Args:
        validation: a fraction, or a number: of documents, or of windows of a stream.

    Raises:
        RequestError: nothing would be left on one side.
    """
    if contiguous:
        total = shards.token_count
        wanted = round(validation * total) if isinstance(validation, float) else validation * length
        if not 2 <= wanted <= total - 2:
            raise RequestError(
                f"data.validation: {validation} of the {total:,} tokens of {key} leaves none on one side; change it, "
                "or set it to null"
            )
        return _stream(shards, 0, total - wanted, length), _stream(shards, total - wanted, total, length)
    held = _held_back(shards.digests, validation, seed, key)
    whole = everything(shards, length, contiguous=False)
    sides = [Spans(shards, whole.begins[side], whole.ends[side], length) for side in (~held, held)]
    return sides[0], sides[1]


def fingerprint_of(parts: Sequence[Spans], mixture: tuple[Part, ...] | None) -> str:
    """Of the tokens and how they are cut, wherever they lie."""
    digest = hashlib.sha256(repr(mixture).encode())
    for part in parts:
        digest.update(f"{part.shards.fingerprint}/{part.length}/".encode())
        digest.update(part.begins.tobytes())
    return digest.hexdigest()[:32]


def _stream(shards: Shards, begin: int, end: int, length: int) -> Spans:
    return Spans(shards, np.asarray([begin], dtype=np.int64), np.asarray([end], dtype=np.int64), length)


def _held_back(digests: npt.NDArray[np.uint64], validation: float | int, seed: int, key: str) -> npt.NDArray[np.bool_]:
    """Which documents are held back: the first of an order that the seed and their tokens decide."""
    total = len(digests)
    wanted = max(1, round(validation * total)) if isinstance(validation, float) else int(validation)
    if wanted >= total:
        raise RequestError(
            f"data.validation: {validation} of the {total:,} documents of {key} leaves none to train on; lower it, set "
            "it to null, or pretrain.windows to contiguous, where it is the end of the text"
        )
    ranks = _mixed(digests, seed)
    order = np.argsort(ranks, kind="stable")
    # Equal documents stay together, on the side of training.
    border = ranks[order[wanted]]
    held = ranks < border
    if not held.any():
        raise RequestError(f"data.validation: the documents of {key} are too much alike to hold any back; set null")
    return held


def _mixed(digests: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Another order of the digests for every seed (the finaliser of splitmix64, Steele et al., OOPSLA 2014)."""
    salt = int.from_bytes(hashlib.sha256(f"{seed}/held back".encode()).digest()[:8], "little")
    mixed = digests ^ np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
