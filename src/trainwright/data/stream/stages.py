"""The examples of a run in stages, each with its own mixture of the sources (``data.stages``).

Within a stage, the sources take turns by their weights, so that after any number of examples each has had its share,
rounded. A source is read in rounds, each in an order of its own, and goes on in a stage where it stopped in the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from trainwright.data.tokens.dataset import Indices, MixturePart, draw_rounds, permute_indices
from trainwright.errors import RequestError
from trainwright.recipe.sections.fields import Until
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

_BLOCK = 4096  # examples of a stage that are ordered at a time


class Stage(NamedTuple):
    """A part of a run: the weights of the sources [sources], 0 where one is not used.

    ``until``: its end; None: that of the run. ``max_length``: the most tokens of a sequence, if windows are divided.
    """

    weights: tuple[float, ...]
    until: Until | None
    max_length: int | None = None


@dataclass(frozen=True)
class Stages:
    """The stages of a run, and its end."""

    stages: tuple[Stage, ...]
    end: Until

    @classmethod
    def of(cls, recipe: RecipeSchema, dataset: Mixed) -> Stages | None:
        """Return the stages of a recipe; None if it has none."""
        data = recipe.data
        if data.stages is None:
            return None
        stages = zip(data.list_stage_weights(count_source_examples(dataset)), data.stages, strict=True)
        return cls(tuple(Stage(weights, stage.end, stage.max_length) for weights, stage in stages), recipe.train.end)


class Mixed(Protocol):
    """A dataset of several sources, or of one."""

    @property
    def mixture(self) -> tuple[MixturePart, ...] | None:
        """Return the parts of a mixture; None for a single source."""

    def __len__(self) -> int: ...


def count_source_examples(dataset: Mixed) -> list[int]:
    """Return the number of examples of each source."""
    return [part.examples for part in dataset.mixture] if dataset.mixture else [len(dataset)]


class _Start(NamedTuple):
    """Where a stage begins: the step, the position of its first example, and the examples that each source has had."""

    step: int
    position: int
    used: Indices


class Sizes(Protocol):
    """The sizes of steps."""

    def at(self, step: int) -> int:
        """Return the number of examples of ``step``, counted from 0."""


class StagedOrder:
    """Which example is at which position of a run in stages: a function of the arguments alone.

    Args:
        sources: the number of examples of each source, stored one source after another.
        key: decides the orders of the sources.
    """

    def __init__(self, stages: Stages, sources: Sequence[int], key: str) -> None:
        self._stages = stages
        self._sizes = sources
        self._first = np.cumsum([0, *sources])
        self._key = key
        self._starts: list[_Start] = []
        self._rounds: dict[int, tuple[str, Indices]] = {}  # of every source, the round that it is in
        self._block: Callable[[int, int], Indices] = lru_cache(4)(self._order_block)

    def place(self, sizes: Sizes, lengths: Callable[[], Indices]) -> int:
        """Find the first step of every stage, and return the number of examples of the run.

        Args:
            lengths: returns the number of tokens of every example.

        Raises:
            RequestError: a stage ends before it begins.
        """
        step, position, tokens = 0, 0, 0
        tokens_of = lengths() if "tokens" in {until.unit for until in self._ends()} else None
        turn_counts = np.zeros(len(self._sizes), dtype=np.int64)

        def passed(until: Until | None) -> bool:
            return until is not None and (step if until.unit == "steps" else tokens) >= until.number

        for number, stage in enumerate(self._stages.stages):
            first, begin = step, position
            self._starts.append(_Start(first, begin, turn_counts))
            while not (passed(stage.until) or passed(self._stages.end)):
                size = sizes.at(step)
                if tokens_of is not None:
                    tokens += int(tokens_of[self.examples(position, position + size)].sum())
                step, position = step + 1, position + size
            if passed(self._stages.end):
                break
            if step == first:
                raise RequestError(
                    f"data.stages[{number}].until: is reached by step {step:,}, before the stage begins; end it later, "
                    "or the stage before it earlier"
                )
            turn_counts = turn_counts + _compute_turns(stage.weights, position - begin, 0)[0]
        return position

    def _ends(self) -> Iterator[Until]:
        yield from (stage.until for stage in self._stages.stages if stage.until is not None)
        yield self._stages.end

    def examples(self, begin: int, end: int) -> Indices:
        """Return the examples from position ``begin`` to ``end``; behind the last stage placed, that stage goes on."""
        pieces = []
        while begin < end:
            number = bisect_right(self._starts, begin, key=lambda start: start.position) - 1
            start, *later = self._starts[number : number + 2]
            block, offset = divmod(begin - start.position, _BLOCK)
            count = min(end - begin, _BLOCK - offset, *(following.position - begin for following in later))
            pieces.append(self._block(number, block)[offset : offset + count])
            begin += count
        return np.concatenate(pieces)

    def _order_block(self, number: int, block: int) -> Indices:
        """Return the examples of a block of a stage [_BLOCK]."""
        before, turns = _compute_turns(self._stages.stages[number].weights, block * _BLOCK, _BLOCK)
        before = before + self._starts[number].used
        examples = np.empty(_BLOCK, dtype=np.int64)
        for source in np.unique(turns):
            its = np.flatnonzero(turns == source)
            first = int(before[source])
            key, order = f"{self._key}/{source}", partial(self._permute_source, int(source))
            rounds = draw_rounds(self._sizes[source], first, first + len(its), key, order)
            examples[its] = self._first[source] + rounds
        return examples

    def _permute_source(self, source: int, size: int, key: str) -> Indices:
        """Return the order of a round of a source; the last one is cached."""
        entry = self._rounds.get(source)
        if entry is None or entry[0] != key:
            entry = self._rounds[source] = (key, permute_indices(size, key))
        return entry[1]

    def max_length(self, step: int) -> int | None:
        """Return the most tokens of a sequence in a step, if its windows are divided."""
        return self._stages.stages[bisect_right(self.first_steps, step) - 1].max_length

    @property
    def first_steps(self) -> list[int]:
        """Return the first step of every stage that the run reaches, counted from 0."""
        return [start.step for start in self._starts]

    @property
    def first_positions(self) -> list[int]:
        """Return the position of the first example of every stage that the run reaches."""
        return [start.position for start in self._starts]

    def lines(self, names: Sequence[str], steps: int, examples: int) -> Iterator[str]:
        """Yield a line about each stage of a run of so many steps and examples."""
        ends = [*self._starts[1:], _Start(steps, examples, np.zeros(0, np.int64))]
        for number, (stage, start, end) in enumerate(zip(self._stages.stages, self._starts, ends, strict=False), 1):
            total = end.position - start.position
            counts = _compute_turns(stage.weights, total, 0)[0]
            of_sources = zip(counts, names, stage.weights, strict=True)
            shares = ", ".join(f"{count:,} of {name}" for count, name, weight in of_sources if weight)
            length = "" if stage.max_length is None else f", in sequences of at most {stage.max_length:,} tokens"
            steps_text = f"steps {start.step + 1:,} to {end.step:,}"
            yield f"stage {number}: {steps_text}, {format_plural(total, 'example')}: {shares}{length}"
        for number in range(len(self._starts) + 1, len(self._stages.stages) + 1):
            yield f"stage {number}: the run ends before it"


def _compute_turns(weights: Sequence[float], begin: int, count: int) -> tuple[Indices, Indices]:
    """Return how many of the first ``begin`` turns each source has [sources], and the sources of the next ones [count].

    The n-th turn of a source with a share s is at (n + 1/2) / s, and turns are in this order, so that the counts are
    always the shares rounded by the method of Sainte-Lague.
    """
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    # The number of turns before a time differs from it by less than the number of sources.
    slack = len(shares) + 1
    certain = np.maximum(0, np.floor((begin - slack) * shares).astype(np.int64) - 1) * (shares > 0)
    limits = np.where(shares > 0, np.ceil((begin + count + slack) * shares).astype(np.int64) + 1, 0)
    sources = np.repeat(np.arange(len(shares)), limits - certain)
    numbers = np.concatenate([np.arange(low, high) for low, high in zip(certain, limits, strict=True)])
    order = np.lexsort((sources, (numbers + 0.5) / shares[sources]))
    skip_count = begin - int(certain.sum())
    before = certain + np.bincount(sources[order[:skip_count]], minlength=len(shares))
    return before, sources[order[skip_count : skip_count + count]]
