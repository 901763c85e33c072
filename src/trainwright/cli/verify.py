"""``trainwright verify``: prove that a recipe gives the same run on several processes as on one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainwright.cli.recipe import Overrides, RecipeFile


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 5,
) -> None:
    """Compare a few steps on one process with the recipe's strategy and processes, on this machine.

    Losses and gradient norms are shown side by side; nothing is written under runs/.
    Ends with 0: the same run, 4: they part or a side failed, 2: wrong request, 3: unfit machine, 75: stopped.
    """
    from trainwright.data.sources import check_source
    from trainwright.doctor.verify import verify as compare
    from trainwright.machine.detect import detect
    from trainwright.planning.resolve import resolve
    from trainwright.recipe.loading import load_recipe
    from trainwright.worker import prepare

    machine = detect()
    resolved = resolve(load_recipe(recipe, overrides or []), machine).recipe
    check_source(resolved.data.train)
    if isinstance(resolved.data.validation, str):
        check_source(resolved.data.validation, "data.validation")
    raise typer.Exit(compare(resolved, machine, steps, prepare, sys.stdout))
