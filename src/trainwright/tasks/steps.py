"""The length of a run, from the recipe and the training data."""

from __future__ import annotations

from typing import Protocol

from trainwright.data.stream.stream import BatchSizes, Data, Stream
from trainwright.recipe.schema import Recipe


class Sized(Protocol):
    """The interface of training data with a known size."""

    def __len__(self) -> int: ...

    @property
    def token_count(self) -> int:
        """Return the number of tokens."""


def batch_sizes(recipe: Recipe) -> BatchSizes:
    """Return the number of examples of each step."""
    train = recipe.train
    return BatchSizes(train.global_batch_size, train.initial_batch_size, train.batch_warmup_steps)


def planned_examples(recipe: Recipe, dataset: Sized) -> int:
    """Return the number of examples of the run, with repetitions over epochs."""
    train = recipe.train
    if train.max_steps is not None:
        return batch_sizes(recipe).before(train.max_steps)
    if train.max_tokens is not None:
        return max(1, -(-train.max_tokens * len(dataset) // max(1, dataset.token_count)))
    assert train.epochs is not None
    return max(1, round(train.epochs * len(dataset)))


def stream_of(
    recipe: Recipe, dataset: Data, total: int, *, training: bool, shuffle: bool, example_weight: float | None = None
) -> Stream[Data]:
    """Return the stream of a resolved recipe, with ``total`` examples; see ``Stream``."""
    train, parallel = recipe.train, recipe.parallel
    rows, steps = train.micro_batch_size, train.gradient_accumulation_steps
    assert parallel.num_processes != "auto", "the recipe is resolved"
    return Stream(
        dataset,
        global_batch_size=train.global_batch_size,
        seed=train.seed,
        rows=None if rows == "auto" else rows,
        passes=1 if steps == "auto" else steps * parallel.num_processes,
        pack_length=recipe.data.pack_length,
        total_examples=total,
        shuffle=shuffle,
        example_weight=example_weight,
        warm_up=batch_sizes(recipe) if training else None,
    )
