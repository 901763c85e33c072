"""``trainwright watch``: a live page of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    directory: Annotated[Path, typer.Argument(metavar="[RUN|DIRECTORY]", help="A run, or where to look.")] = Path(
        "runs"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port. 0: any free port.")] = 0,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; others than this machine's can reach it.")
    ] = "127.0.0.1",
) -> None:
    """Show runs on a live page until Ctrl-C: curves over each other, recipes, samples, faults, logs, a stop button.

    The address that is printed has a token, without which nothing is shown.
    """
    from trainwright.paths import run_path
    from trainwright.watching.serving import serve

    serve(run_path(directory), host, port)
