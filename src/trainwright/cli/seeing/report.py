"""``trainwright report`` and ``trainwright compare``: pages about runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.text import say, table_width


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write. Default: report.html in the run's directory.")
    ] = None,
) -> None:
    """Write a run as one HTML page: curves, samples, plan and measurements, faults, recipe.

    The page needs no network. The run may still be training.
    """
    import trainwright as tw

    say(f"written: {tw.report(run, out)}")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Run directories, or directories of runs.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with the curves.")] = None,
) -> None:
    """Compare runs: the keys in which their recipes differ, their evaluations paired by step, and their curves."""
    import trainwright as tw

    found = tw.compare(*runs, out=out)
    for line in found.lines(table_width(sys.stdout)):
        say(line, wrap=False)
    if found.page is not None:
        say(f"written: {found.page}")
