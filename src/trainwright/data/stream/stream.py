"""The global stream: which examples step k sees, and which rank computes which part of them.

The content of global batch k depends on (seed, dataset, k) alone, and its division into micro-batches on the rows of
one beside. The number of ranks only decides who computes a micro-batch, so a run is the same on any of them and its
position in the data is one integer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainwright.data.stream.batch_sizes import BatchSizes
from trainwright.data.stream.dataset import Companions
from trainwright.data.stream.mixture import Part, drawn, permuted
from trainwright.data.stream.packing import best_fit_decreasing


class Examples(Protocol):
    """What a stream asks of a data set: how long its examples are, and nothing of what is in them.

    Attributes:
        fingerprint: of all that is in it.
        mixture: the sources whose examples follow each other, where an epoch has of each as many as its share.
    """

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that the examples depend on."""

    @property
    def mixture(self) -> tuple[Part, ...] | None:
        """Return the parts of a mixture; None for a single source."""

    @property
    def companions(self) -> Companions | None:
        """Return the companions of the examples; None if they have none."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def documents(self, index: int) -> tuple[int, ...]:
        """Return the parts of one example that a model reads each by itself."""

    def document_length(self, document: int) -> int:
        """Tokens of one part."""

    def length(self, index: int) -> int:
        """Tokens of one example."""

    def target_count(self, index: int) -> int:
        """Targets of one example."""

    def will_need(self, examples: Iterable[int]) -> None:
        """Told of the examples that are asked for next."""


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward and backward pass, as rows: a row is an example, or a pack of several.

    An example of several documents is one row all the same; not packed, each document has a line of its own.
    """

    index: int  # within the global batch; seeds the dropout
    rows: tuple[tuple[int, ...], ...]
    tokens: int
    targets: int
    weight: float  # of its examples; 0 for a pass that only keeps other ranks company

    @property
    def examples(self) -> tuple[int, ...]:
        """Return the indices of the examples, row after row."""
        return tuple(example for row in self.rows for example in row)


@dataclass(frozen=True)
class GlobalBatch:
    """Everything one optimizer step sees, over all ranks."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def weight(self) -> float:
        """Weight of all examples: what the summed loss is divided by."""
        return sum(micro.weight for micro in self.micro_batches)

    @property
    def targets(self) -> int:
        """Return the number of targets of all micro-batches."""
        return sum(micro.targets for micro in self.micro_batches)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all micro-batches."""
        return sum(micro.tokens for micro in self.micro_batches)

    @property
    def rows(self) -> int:
        """Rows of the largest micro-batch."""
        return max(len(micro.rows) for micro in self.micro_batches)

    @property
    def examples(self) -> int:
        """Number of examples."""
        return sum(len(micro.examples) for micro in self.micro_batches)

    def for_rank(self, rank: int, size: int) -> tuple[MicroBatch, ...]:
        """Return this rank's share, balanced by tokens; the same number of passes on every rank.

        A rank that has fewer micro-batches than others is given zero-weight passes over the smallest one, as a
        sharded model needs every rank in every forward and backward.
        """
        passes = math.ceil(len(self.micro_batches) / size)
        shares: list[list[MicroBatch]] = [[] for _ in range(size)]
        for micro in sorted(self.micro_batches, key=lambda m: (-m.tokens, m.index)):
            free = [share for share in shares if len(share) < passes]
            min(free, key=lambda share: sum(m.tokens for m in share)).append(micro)
        filler = replace(min(self.micro_batches, key=lambda m: (m.tokens, m.index)), weight=0.0)
        share = sorted(shares[rank], key=lambda m: m.index)
        return tuple(share) + (filler,) * (passes - len(share))


Data = TypeVar("Data", bound=Examples)


class Stream(Generic[Data]):
    """Global batches of a dataset, epoch after epoch, each example once an epoch; of a mixture, by its shares.

    Companions are gone through in rounds of an order of their own, so that none joins twice more often than another.

    Args:
        global_batch_size: examples a step.
        warm_up: sizes of the first steps, where they are smaller.
        rows: rows (examples, or packs) of a micro-batch; None divides each global batch into
            ``passes`` micro-batches instead.
        pack_length: tokens a pack holds, or None when a row is one example.
        total_examples: where the stream ends; the last global batch may be smaller.
        example_weight: what every example counts in the loss, or None when each of its targets counts 1.
    """

    def __init__(
        self,
        dataset: Data,
        *,
        global_batch_size: int,
        seed: int,
        rows: int | None,
        passes: int = 1,
        pack_length: int | None = None,
        total_examples: int | None = None,
        shuffle: bool = True,
        example_weight: float | None = None,
        warm_up: BatchSizes | None = None,
    ) -> None:
        if not len(dataset):
            raise ValueError("a stream needs at least one example")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.sizes = warm_up or BatchSizes(global_batch_size)
        self.total_examples = total_examples
        self._seed = seed
        self._rows = rows
        self._passes = passes
        self._pack_length = pack_length
        self._shuffle = shuffle
        self._example_weight = example_weight
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        """Return the number of global batches up to ``total_examples``."""
        if self.total_examples is None:
            raise TypeError("this stream has no end")
        return self.sizes.steps_for(self.total_examples)

    def limit_rows(self, rows: int) -> None:
        """Divide global batches into micro-batches of at most so many rows from now on, with the same examples."""
        self._rows = rows if self._rows is None else min(rows, self._rows)

    def fullest(self, steps: int) -> int:
        """Which of the first ``steps`` global batches has the micro-batch with most tokens, padding included."""
        if self.total_examples is not None:
            steps = min(steps, len(self))
        return max(range(steps), key=lambda step: max(map(self.positions, self.global_batch(step).micro_batches)))

    def positions(self, micro: MicroBatch) -> int:
        """Return what a micro-batch has the model compute: its tokens, and where it is not packed its padding."""
        if self._pack_length is not None:
            return micro.tokens
        documents = [document for example in micro.examples for document in self.dataset.documents(example)]
        return len(documents) * max(map(self.dataset.document_length, documents))

    def examples(self, step: int) -> list[int]:
        """Return the indices of the examples of global batch ``step`` (from 0), in the order of the epoch."""
        begin = self.sizes.before(step)
        end = begin + self.sizes.at(step)
        if self.total_examples is not None:
            end = min(end, self.total_examples)
        if begin >= end:
            raise IndexError(f"the stream ends before global batch {step}")
        size = len(self.dataset)
        return [int(self._epoch(position // size)[position % size]) for position in range(begin, end)]

    def seen(self) -> list[int]:
        """Every example that a global batch has, in the order of the dataset."""
        all_in_an_epoch = self.dataset.companions is None and (self.dataset.mixture is None or not self._shuffle)
        if self.total_examples is None or (all_in_an_epoch and self.total_examples >= len(self.dataset)):
            return list(range(len(self.dataset)))
        return sorted({example for step in range(len(self)) for example in self.examples(step)})

    def global_batch(self, step: int) -> GlobalBatch:
        """Global batch ``step``, divided into micro-batches."""
        examples = self.examples(step)
        if self.total_examples is None or self.sizes.before(step + 1) < self.total_examples:
            self.dataset.will_need(self.examples(step + 1))  # read while this step is computed
        return self.divide(examples)

    def divide(self, examples: Sequence[int], most_rows: int | None = None) -> GlobalBatch:
        """Any examples of the dataset as a global batch, divided into micro-batches, of at most so many rows."""
        lengths = [self.dataset.length(example) for example in examples]
        if self._pack_length is None:
            # Neighbours in length share a micro-batch, so that little of it is padding.
            order = sorted(range(len(examples)), key=lambda i: (-lengths[i], i))
            rows: list[tuple[int, ...]] = [(examples[i],) for i in order]
        else:
            packs = best_fit_decreasing(lengths, self._pack_length)
            rows = [tuple(examples[i] for i in pack) for pack in packs]
        sizes = dict(zip(examples, lengths, strict=True))
        groups = enumerate(self._groups(rows, most_rows))
        return GlobalBatch(tuple(self._micro_batch(i, group, sizes) for i, group in groups))

    def _groups(self, rows: list[tuple[int, ...]], most_rows: int | None) -> list[tuple[tuple[int, ...], ...]]:
        size = min(self._rows or math.ceil(len(rows) / self._passes), most_rows or len(rows))
        return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _micro_batch(self, index: int, rows: tuple[tuple[int, ...], ...], sizes: Mapping[int, int]) -> MicroBatch:
        examples = [example for row in rows for example in row]
        tokens = sum(map(sizes.__getitem__, examples))
        targets = sum(self.dataset.target_count(example) for example in examples)
        weight = float(targets) if self._example_weight is None else self._example_weight * len(examples)
        return MicroBatch(index, rows, tokens, targets, weight)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of one epoch, kept until another is asked for."""
        if self._order[0] != epoch:
            size, companions = len(self.dataset), self.dataset.companions
            order = np.arange(size, dtype=np.int64)
            key = f"{self._seed}/{self.dataset.fingerprint}"
            if self._shuffle:
                order = permuted(size, f"{key}/{epoch}")
                if self.dataset.mixture is not None:
                    order = drawn(self.dataset.mixture, epoch, key)[order]
            if companions is not None:
                order = order + size * drawn([Part(companions.count, size)], epoch, f"{key}/companions")
            self._order = (epoch, order)
        return self._order[1]
