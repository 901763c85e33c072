"""From a task's name in a recipe to its code, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trainwright.engine.task import Task
from trainwright.recipe.schema import Recipe, TaskName

# Each of these modules has `build` and `prepare_once`.
_MODULES: dict[TaskName, str] = {
    "sft": "trainwright.tasks.sft.task",
    "dpo": "trainwright.tasks.dpo.task",
    "pretrain": "trainwright.tasks.pretrain.task",
    "unlearn": "trainwright.tasks.unlearn.task",
    "algorithm_distillation": "trainwright.tasks.algorithm_distillation.task",
}


def build_task(recipe: Recipe, cache: Path) -> Task:
    """The recipe's task with its data mapped and its model on the CPU in fp32. Knows nothing of other processes."""
    task: Task = _module(recipe).build(recipe, cache)
    return task


def prepare_task(recipe: Recipe, cache: Path) -> int:
    """Do once what every worker needs: prepared data, converted weights. Returns the number of training examples.

    Raises:
        RequestError: the data or the model cannot be used as the recipe says.
    """
    examples: int = _module(recipe).prepare_once(recipe, cache)
    return examples


def _module(recipe: Recipe) -> Any:
    return import_module(_MODULES[recipe.task])
