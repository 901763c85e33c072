"""``trainwright runs``: the runs under a directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.text import say, table_width


def runs(
    directory: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
    status: Annotated[
        str | None, typer.Option(help="Only these: training, finished, stopped, failed or ended.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only runs of this task.")] = None,
    name: Annotated[str | None, typer.Option(help="Only runs whose path contains this.")] = None,
    sort: Annotated[
        str,
        typer.Option(help="By begun, run, status, step, best, tokens_per_second, goodput, task or model."),
    ] = "begun",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the runs under a directory, the newest first.

    failed: the last event is a fault. ended: the run was killed, or failed without an event. Goodput is the time in
    steps that count, of all time since the run began. On a narrow terminal the last columns are left out.
    """
    import trainwright as tw
    from trainwright.api.seeing.runs import table

    found = tw.runs(directory, status=status, task=task, name=name, sort=sort)
    if as_json:
        say(json.dumps([each.values() for each in found], indent=1), wrap=False)
        return
    if not found:
        say(f"no such runs under {directory}")
        return
    for line in table(found, table_width(sys.stdout)):
        say(line, wrap=False)
