"""How long a run is, from the recipe and the number of training examples."""

from __future__ import annotations

from trainwright.recipe.schema import Recipe


def planned_examples(recipe: Recipe, examples: int) -> int:
    """Number of examples the run goes through, repetitions of epochs counted."""
    train = recipe.train
    if train.max_steps is not None:
        return train.max_steps * train.global_batch_size
    assert train.epochs is not None
    return max(1, round(train.epochs * examples))
