"""``trainwright collect``: let an algorithm learn in an environment, and record its learning histories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.recipe import Overrides
from trainwright.text import say


def collect(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe with task algorithm_distillation.")],
    overrides: Overrides = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes, one core each. Default: one per core.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Plot the algorithm's learning curve to this file.")
    ] = None,
) -> None:
    """Collect the histories that a recipe trains on.

    If stopped, the same command continues: finished tasks are kept. Ends with 75 when stopped by a signal.
    """
    from trainwright.api.collecting import collected

    say(str(collected(recipe, tuple(overrides or ()), num_processes, chart)))
