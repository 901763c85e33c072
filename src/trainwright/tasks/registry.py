"""From a task's name in a recipe to its code, imported when it is asked for."""

from __future__ import annotations

from pathlib import Path

from trainwright.engine.task import Task
from trainwright.recipe.schema import Recipe


def build_task(recipe: Recipe, cache: Path) -> Task:
    """The recipe's task with its data mapped and its model on the CPU in fp32. Knows nothing of other processes."""
    if recipe.task == "sft":
        from trainwright.tasks.sft.task import build

        return build(recipe, cache)
    if recipe.task == "dpo":
        from trainwright.tasks.dpo import task as dpo

        return dpo.build(recipe, cache)
    raise ValueError(f"task: {recipe.task} is not a task")


def prepare_task(recipe: Recipe, cache: Path) -> int:
    """Do once what every worker needs: prepared data, converted weights. Returns the number of training examples.

    Raises:
        RequestError: the data or the model cannot be used as the recipe says.
    """
    if recipe.task == "sft":
        from trainwright.tasks.sft.task import prepare_once

        return prepare_once(recipe, cache)
    if recipe.task == "dpo":
        from trainwright.tasks.dpo import task as dpo

        return dpo.prepare_once(recipe, cache)
    raise ValueError(f"task: {recipe.task} is not a task")
