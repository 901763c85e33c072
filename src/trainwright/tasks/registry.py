"""Import the code of the task that a recipe names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from trainwright.engine.task import Task
from trainwright.errors import RequestError
from trainwright.recipe.schema import RecipeSchema


class TaskModule(Protocol):
    """The functions of a task's module."""

    def prepare_once(self, recipe: RecipeSchema, cache: Path) -> int:
        """Prepare once what every worker needs: data and converted weights. Returns the number of training examples.

        Raises:
            RequestError: the data or the model does not fit the recipe.
        """

    def build(self, recipe: RecipeSchema, cache: Path) -> Task:
        """Return the task with its data memory-mapped and its model on the CPU in fp32; needs no process group."""


def task_module(recipe: RecipeSchema) -> TaskModule:
    """Import and return the module of the recipe's task.

    Raises:
        RequestError: the module of another package cannot be imported, or lacks a function.
    """
    described = f"{recipe.spec.module}, the code of task {recipe.task},"
    try:
        module = import_module(recipe.spec.module)
    except ImportError as error:
        raise RequestError(f"{described} cannot be imported: {error}") from error
    if missing := [name for name in ("build", "prepare_once") if not hasattr(module, name)]:
        raise RequestError(f"{described} lacks {' and '.join(missing)}")
    return cast(TaskModule, module)
