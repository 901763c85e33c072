"""How long a run is, from the recipe and the number of training examples."""

from __future__ import annotations

import math

from trainwright.recipe.schema import Recipe


def planned_examples(recipe: Recipe, examples: int) -> int:
    """Number of examples the run goes through, repetitions of epochs counted."""
    train = recipe.train
    if train.max_steps is not None:
        return train.max_steps * train.global_batch_size
    assert train.epochs is not None
    return max(1, round(train.epochs * examples))


def planned_steps(recipe: Recipe, examples: int) -> int:
    """Number of optimizer steps of the run."""
    return math.ceil(planned_examples(recipe, examples) / recipe.train.global_batch_size)
