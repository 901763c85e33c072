"""The global stream of batches: which examples step k sees, and which rank computes them.

The content of global batch k depends only on (seed, dataset, k); its division into micro-batches also depends on the
number of rows per micro-batch. The number of ranks only decides which rank computes a micro-batch, so a run is the same
on any number of ranks and its position in the data is one integer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainwright.data.stream.stages import StagedOrder, Stages, count_source_examples
from trainwright.data.stream.streamed import StreamedDataset
from trainwright.data.tokens.dataset import MixturePart, PairedSequences, draw_examples, permute_indices
from trainwright.data.tokens.packing import best_fit_decreasing, count_examples_within, pack_in_order
from trainwright.recipe.sections.train import BatchUnit

if TYPE_CHECKING:
    from trainwright.parallel.world import World

# The number of steps, or examples, among which the largest is searched.
_LOOKED_AT_STEPS, _LOOKED_AT_EXAMPLES = 300, 30_000
_STEPS_BEHIND = 4  # steps before the present one whose examples stay, if sources are tokenized while training


@dataclass(frozen=True)
class BatchSizes:
    """``final`` examples per step; in the first ``steps`` steps the number grows linearly from ``initial``."""

    final: int
    initial: int | None = None
    steps: int = 0

    def at(self, step: int) -> int:
        """Return the number of examples of ``step``, counted from 0."""
        if self.initial is None or step >= self.steps:
            return self.final
        return self.initial + (self.final - self.initial) * step // self.steps

    def before(self, step: int) -> int:
        """Return the number of examples of all steps before ``step``."""
        growing = min(step, self.steps) if self.initial is not None else 0
        return sum(map(self.at, range(growing))) + (step - growing) * self.final

    def count_steps_for(self, examples: int) -> int:
        """Return the number of steps for ``examples`` examples; the last step may be smaller."""
        ends = np.cumsum([self.at(step) for step in range(self.steps if self.initial is not None else 0)], dtype=int)
        if len(ends) and examples <= ends[-1]:
            return int(np.searchsorted(ends, examples, side="left")) + 1
        grown = int(ends[-1]) if len(ends) else 0
        return len(ends) + -(-(examples - grown) // self.final)


class FittingSizes:
    """Steps of as many examples as fit, one after another.

    Args:
        fit: returns how many of the next examples, given by their lengths, are a step.
        length: returns the number of tokens of the example at a position of the stream.
    """

    def __init__(self, fit: Callable[[Iterator[int]], int], length: Callable[[int], int]) -> None:
        self._fit, self._length = fit, length
        self._begins = [0]

    def at(self, step: int) -> int:
        """Return the number of examples of ``step``, counted from 0."""
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        """Return the number of examples of all steps before ``step``."""
        while len(self._begins) <= step:
            self._extend()
        return self._begins[step]

    def count_steps_for(self, examples: int) -> int:
        """Return the number of steps for ``examples`` examples; the last step may be smaller."""
        while self._begins[-1] < examples:
            self._extend()
        return bisect_left(self._begins, examples)

    def _extend(self) -> None:
        begin = self._begins[-1]
        self._begins.append(begin + self._fit(map(self._length, count(begin))))


class SetSizes:
    """Steps over sets of examples, one set after another, each with the steps that it has alone.

    Args:
        final: the number of examples of a step; the last step of a set may have fewer.
        sets: the number of examples of each set, by name.
    """

    def __init__(self, final: int, sets: Mapping[str, int]) -> None:
        self._begins = [0]
        self._names: list[str] = []
        for name, size in sets.items():
            first = self._begins[-1]
            self._begins += [first + min(end, size) for end in range(final, size + final, final)]
            self._names += [name] * (len(self._begins) - 1 - len(self._names))

    def at(self, step: int) -> int:
        """Return the number of examples of ``step``, counted from 0."""
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        """Return the number of examples of all steps before ``step``."""
        return self._begins[min(step, len(self._names))]

    def count_steps_for(self, examples: int) -> int:
        """Return the number of steps for ``examples`` examples."""
        return bisect_left(self._begins, examples)

    def set_of(self, step: int) -> str:
        """Return the name of the set that the examples of ``step`` are in."""
        return self._names[step]


class Examples(Protocol):
    """The interface of a dataset that a stream needs: the sizes of its examples, without their content.

    Attributes:
        fingerprint: a hash of the content.
        mixture: the sources, whose examples are stored one source after another and are sampled by share.
    """

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that the examples depend on."""

    @property
    def mixture(self) -> tuple[MixturePart, ...] | None:
        """Return the parts of a mixture; None for a single source."""

    @property
    def paired(self) -> PairedSequences | None:
        """Return the sequences that are paired with the examples; None if they have none."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def sequences(self, index: int) -> tuple[int, ...]:
        """Return the indices of the sequences of one example, which the model processes separately."""

    def sequence_length(self, sequence: int) -> int:
        """Return the number of tokens of one sequence."""

    def length(self, index: int) -> int:
        """Return the number of tokens of one example."""

    def target_count(self, index: int) -> int:
        """Return the number of targets of one example."""

    def example_lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of every example."""

    def will_need(self, examples: Iterable[int]) -> None:
        """Announce the examples that are read next."""


@dataclass(frozen=True)
class MicroBatch:
    """The examples of one forward and backward pass, as rows: a row is an example, or a pack of several.

    An example of several sequences is also one row; without packing, each sequence is a separate row of the tensors.
    """

    index: int  # within the global batch; seeds dropout
    rows: tuple[tuple[int, ...], ...]
    tokens: int
    targets: int
    weight: float  # sum over its examples; 0 for a zero-weight pass
    max_length: int | None = None  # the most tokens of a sequence, if windows are divided

    @property
    def examples(self) -> tuple[int, ...]:
        """Return the indices of the examples, row after row."""
        return tuple(example for row in self.rows for example in row)


@dataclass(frozen=True)
class GlobalBatch:
    """All examples of one optimizer step, over all ranks."""

    micro_batches: tuple[MicroBatch, ...]

    @property
    def weight(self) -> float:
        """Return the weight of all examples, by which the summed loss is divided."""
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
        """Return the number of rows of the largest micro-batch."""
        return max(len(micro.rows) for micro in self.micro_batches)

    @property
    def examples(self) -> int:
        """Return the number of examples of all micro-batches."""
        return sum(len(micro.examples) for micro in self.micro_batches)

    def select_for_rank(self, rank: int, size: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches, balanced by tokens; every rank gets the same number of passes.

        Ranks with fewer micro-batches get zero-weight passes over the smallest one, because a sharded model needs every
        rank in each forward and backward pass.
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


@dataclass(frozen=True)
class StreamSettings:
    """How a stream divides examples into global batches and micro-batches.

    Attributes:
        global_batch_size: examples per step, or packs, or tokens.
        rows: rows (examples or packs) per micro-batch; None divides each global batch into ``micro_batches`` of them
            instead.
        pack_length: tokens per pack, or None if each row is one example.
        total_examples: the number of examples in the stream; the last global batch may be smaller.
        example_weight: the weight of each example in the loss, or None if each target has weight 1.
        warm_up: sizes of the first steps, if they are smaller.
        unit: what ``global_batch_size`` counts. Of ``packs`` and ``tokens`` a step has the examples that fit.
        sets: the number of examples of each named set of the dataset, one after another; a step is of one set.
        stages: the stages of the run, which decide ``total_examples``; None: every epoch has the same mixture.
    """

    global_batch_size: int
    seed: int
    rows: int | None
    micro_batches: int = 1
    pack_length: int | None = None
    total_examples: int | None = None
    shuffle: bool = True
    example_weight: float | None = None
    warm_up: BatchSizes | None = None
    unit: BatchUnit = "examples"
    sets: Mapping[str, int] = field(default_factory=dict)
    stages: Stages | None = None


class Stream(Generic[Data]):
    """Global batches of a dataset over epochs, each example once per epoch, or as often as the mixture's shares say.

    Paired sequences are sampled in rounds with an order of their own, so that all are used almost equally often.
    """

    def __init__(self, dataset: Data, settings: StreamSettings) -> None:
        if not len(dataset):
            raise ValueError("a stream needs at least one example")
        self.dataset = dataset
        # If its sources are tokenized while training.
        self._streamed: StreamedDataset | None = dataset if isinstance(dataset, StreamedDataset) else None
        self.sizes: BatchSizes | FittingSizes | SetSizes = settings.warm_up or BatchSizes(settings.global_batch_size)
        if settings.sets:
            self.sizes = SetSizes(settings.global_batch_size, settings.sets)
        if settings.unit != "examples":
            self.sizes = FittingSizes(self._fit, lambda position: dataset.length(self.find_example(position)))
        self.global_batch_size = settings.global_batch_size
        self.total_examples = settings.total_examples
        self.settings = settings
        self._rows = settings.rows
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        self.staged: StagedOrder | None = None
        if settings.stages is not None:
            self.staged = StagedOrder(settings.stages, count_source_examples(dataset), self._key)
            self.total_examples = self.staged.place(self.sizes, dataset.example_lengths)

    def __len__(self) -> int:
        """Return the number of global batches up to ``total_examples``."""
        if self.total_examples is None:
            raise TypeError("this stream has no end")
        return self.sizes.count_steps_for(self.total_examples)

    def set_of(self, step: int) -> str:
        """Return the name of the set that the examples of ``step`` are in; "" if sets have no names."""
        return self.sizes.set_of(step) if isinstance(self.sizes, SetSizes) else ""

    @property
    def division(self) -> str:
        """Return all that the division of examples into micro-batches depends on."""
        return f"{self.global_batch_size} {self._rows} {self.settings.micro_batches} {self.settings.pack_length}"

    def _fit(self, lengths: Iterator[int]) -> int:
        """Return how many of the next examples are a step: those that fit into its packs, or into its tokens."""
        size, pack = self.settings.global_batch_size, self.settings.pack_length
        if self.settings.unit == "tokens":
            return count_examples_within(lengths, size)
        assert pack is not None
        return sum(map(len, pack_in_order(lengths, size, pack)))

    def open_reading(self, ranks: World) -> AbstractContextManager[None]:
        """Return a context in which the examples can be read; all ranks must enter it.

        Outside of it, those of sources that are tokenized while training have the sizes of the first ones.
        """
        return nullcontext() if self._streamed is None or ranks.alone else self._streamed.shards.open_reading(ranks)

    def state(self, step: int) -> dict[str, int]:
        """Return what a resumed run needs to read on at ``step``; empty if all examples are there."""
        return {} if self._streamed is None else self._streamed.begin_of(self.sizes.before(step))

    def resume(self, state: Mapping[str, int]) -> None:
        """Read on where ``state`` says."""
        if state and self._streamed is not None:
            self._streamed.resume(**state)

    def limit_rows(self, rows: int) -> None:
        """Limit later micro-batches to ``rows`` rows; global batches keep the same examples."""
        self._rows = rows if self._rows is None else min(rows, self._rows)

    def find_largest_step(self) -> int:
        """Return which of the first few hundred steps (of each stage) has the largest micro-batch, with padding."""
        examples = _LOOKED_AT_EXAMPLES if self._streamed is None else len(self._streamed)
        limit = max(1, min(_LOOKED_AT_STEPS, examples // self.global_batch_size))
        begins = [0] if self.staged is None else self.staged.first_steps
        ends = [begin + limit if self.total_examples is None else min(begin + limit, len(self)) for begin in begins]
        steps = [step for begin, end in zip(begins, ends, strict=True) for step in range(begin, end)]
        return max(steps, key=lambda step: max(map(self.positions, self.global_batch(step).micro_batches)))

    def positions(self, micro: MicroBatch) -> int:
        """Return the number of tokens that the model computes for a micro-batch, with padding if it is not packed."""
        if self.settings.pack_length is not None:
            return micro.tokens
        sequences = [sequence for example in micro.examples for sequence in self.dataset.sequences(example)]
        lengths = [self.dataset.sequence_length(sequence) for sequence in sequences]
        longest = min(max(lengths), micro.max_length or max(lengths))
        return sum(-(-length // longest) for length in lengths) * longest

    def examples(self, step: int) -> list[int]:
        """Return the indices of the examples of global batch ``step`` (from 0), in the order of the epoch."""
        begin = self.sizes.before(step)
        end = begin + self.sizes.at(step)
        if self.total_examples is not None:
            end = min(end, self.total_examples)
        if begin >= end:
            raise IndexError(f"the stream ends before global batch {step}")
        return [self.find_example(position) for position in range(begin, end)]

    def find_example(self, position: int) -> int:
        """Return the example at a position of the stream."""
        if self.staged is not None:
            return int(self.staged.examples(position, position + 1)[0])
        size = len(self.dataset)
        return int(self._order_epoch(position // size)[position % size])

    def seen(self) -> list[int]:
        """Return all examples that occur in a global batch, sorted by index."""
        in_order = self.dataset.mixture is None or not self.settings.shuffle
        all_in_an_epoch = self.dataset.paired is None and self.staged is None and in_order
        if self.total_examples is None or (all_in_an_epoch and self.total_examples >= len(self.dataset)):
            return list(range(len(self.dataset)))
        return sorted({example for step in range(len(self)) for example in self.examples(step)})

    def global_batch(self, step: int) -> GlobalBatch:
        """Return global batch ``step``, divided into micro-batches."""
        examples = self.examples(step)
        if self._streamed is not None:
            # Batches are made a step ahead, and other ranks may be a step behind; both steps may be repeated.
            begins = (self.sizes.before(max(0, step - back)) for back in (_STEPS_BEHIND - 1, _STEPS_BEHIND))
            self._streamed.shards.pass_by(*(begin // len(self._streamed) for begin in begins))
        if self.total_examples is None or self.sizes.before(step + 1) < self.total_examples:
            self.dataset.will_need(self.examples(step + 1))  # prefetch while this step is computed
        return self.divide(examples, max_length=None if self.staged is None else self.staged.max_length(step))

    def divide(
        self, examples: Sequence[int], max_rows: int | None = None, max_length: int | None = None
    ) -> GlobalBatch:
        """Divide any examples of the dataset into micro-batches of at most ``max_rows`` rows.

        Each example is in exactly one row: none is split or dropped. With packing, the packs are made here, for each
        global batch.
        """
        lengths = [self.dataset.length(example) for example in examples]
        if self.settings.pack_length is None:
            # Examples of similar length share a micro-batch, which reduces padding.
            order = sorted(range(len(examples)), key=lambda i: (-lengths[i], i))
            rows: list[tuple[int, ...]] = [(examples[i],) for i in order]
        else:
            packs = best_fit_decreasing(lengths, self.settings.pack_length)
            if self.settings.unit == "packs" and len(packs) > self.settings.global_batch_size:  # it is no optimum
                packs = pack_in_order(iter(lengths), self.settings.global_batch_size, self.settings.pack_length)
            rows = [tuple(examples[i] for i in pack) for pack in packs]
        sizes = dict(zip(examples, lengths, strict=True))
        groups = enumerate(self._groups(rows, max_rows))
        micro_batches = (self._build_micro_batch(i, group, sizes) for i, group in groups)
        return GlobalBatch(tuple(replace(micro, max_length=max_length) for micro in micro_batches))

    def _groups(self, rows: list[tuple[int, ...]], max_rows: int | None) -> list[tuple[tuple[int, ...], ...]]:
        size = min(self._rows or math.ceil(len(rows) / self.settings.micro_batches), max_rows or len(rows))
        return [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _build_micro_batch(self, index: int, rows: tuple[tuple[int, ...], ...], sizes: Mapping[int, int]) -> MicroBatch:
        examples = [example for row in rows for example in row]
        tokens = sum(map(sizes.__getitem__, examples))
        targets = sum(self.dataset.target_count(example) for example in examples)
        example_weight = self.settings.example_weight
        weight = float(targets) if example_weight is None else example_weight * len(examples)
        return MicroBatch(index, rows, tokens, targets, weight)

    @property
    def _key(self) -> str:
        """Return what decides the order of the examples."""
        return f"{self.settings.seed}/{self.dataset.fingerprint}"

    def _order_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of one epoch; the last one is cached."""
        if self._order[0] != epoch:
            size, pairing = len(self.dataset), self.dataset.paired
            order, key = np.arange(size, dtype=np.int64), self._key
            if self.settings.shuffle:
                order = permute_indices(size, f"{key}/{epoch}")
                if self.dataset.mixture is not None:
                    order = draw_examples(self.dataset.mixture, epoch, key)[order]
            if self._streamed is not None:  # an epoch is a shard
                order = order + epoch * size
            if pairing is not None:
                order = order + size * draw_examples([MixturePart(pairing.count, size)], epoch, f"{key}/companions")
            self._order = (epoch, order)
        return self._order[1]
