"""``trainwright verify``: check that a recipe gives the same run on several processes as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.cli.trust import TrustCode
from trainwright.errors import EXIT_TRAINING


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 5,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take the number of processes, strategy and related settings from this Accelerate file.",
        ),
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Compare a few steps on one process with the recipe's strategy and processes, on this machine.

    Losses and gradient norms are shown side by side; nothing is written under runs/. Ends with 0: the same run, 4: they
    differ or one failed, 2: wrong request, 3: this machine cannot do it, 75: stopped.
    """
    from trainwright.api.verification import VerifyRequest, compare

    if not compare(VerifyRequest(recipe, tuple(overrides or ()), steps, accelerate_config)).is_same:
        raise typer.Exit(EXIT_TRAINING)
