"""From a task's name in a recipe to its code, imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trainwright.engine.task import Task
from trainwright.errors import RequestError
from trainwright.recipe.schema import Recipe


def build_task(recipe: Recipe, cache: Path) -> Task:
    """Return the recipe's task with its data mapped and its model on the CPU in fp32. Knows nothing of other
    processes.
    """
    task: Task = task_module(recipe).build(recipe, cache)
    return task


def prepare_task(recipe: Recipe, cache: Path) -> int:
    """Do once what every worker needs: prepared data, converted weights. Returns the number of training examples.

    Raises:
        RequestError: the data or the model cannot be used as the recipe says.
    """
    examples: int = task_module(recipe).prepare_once(recipe, cache)
    return examples


def task_module(recipe: Recipe) -> Any:
    """Return the code of the recipe's task, imported.

    Raises:
        RequestError: that of another package cannot be imported, or lacks a function.
    """
    described = f"{recipe.spec.module}, the code of task {recipe.task},"
    try:
        found = import_module(recipe.spec.module)
    except ImportError as error:
        raise RequestError(f"{described} cannot be imported: {error}") from error
    if missing := [name for name in ("build", "prepare_once") if not hasattr(found, name)]:
        raise RequestError(f"{described} lacks {' and '.join(missing)}")
    return found
