"""``trainwright jobs``: runs and the jobs that train them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.text import say, table_width


def jobs(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run directories.", show_default=False)
    ] = None,
) -> None:
    """Show runs and the jobs that train them: those in runs/, and those of your jobs in Slurm's queue."""
    import trainwright as tw
    from trainwright.api.clusters.jobs import table

    for line in table(tw.jobs(*(runs or [])), table_width(sys.stdout)):
        say(line, wrap=False)
