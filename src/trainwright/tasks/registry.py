"""Import the code of the task that a recipe names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trainwright.engine.task import Task
from trainwright.errors import RequestError
from trainwright.recipe.schema import Recipe


def build_task(recipe: Recipe, cache: Path) -> Task:
    """Return the recipe's task with its data memory-mapped and its model on the CPU in fp32; needs no process group."""
    task: Task = task_module(recipe).build(recipe, cache)
    return task


def prepare_task(recipe: Recipe, cache: Path) -> int:
    """Prepare once what every worker needs: data and converted weights. Returns the number of training examples.

    Raises:
        RequestError: the data or the model does not fit the recipe.
    """
    examples: int = task_module(recipe).prepare_once(recipe, cache)
    return examples


def task_module(recipe: Recipe) -> Any:
    """Import and return the module of the recipe's task.

    Raises:
        RequestError: the module of another package cannot be imported, or lacks a function.
    """
    described = f"{recipe.spec.module}, the code of task {recipe.task},"
    try:
        found = import_module(recipe.spec.module)
    except ImportError as error:
        raise RequestError(f"{described} cannot be imported: {error}") from error
    if missing := [name for name in ("build", "prepare_once") if not hasattr(found, name)]:
        raise RequestError(f"{described} lacks {' and '.join(missing)}")
    return found
