"""``trainwright tensorboard``: the curves of runs in a browser, alone or while a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the directory belongs to the other command


def tensorboard(
    directory: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Directory of runs.")] = Path("runs"),
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...", help="Command to run; TensorBoard stops when it ends.", show_default=False
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port. 0: any free port.")] = 0,
) -> None:
    """Show curves on a local address; with a command, until it ends, and with its exit code."""
    from trainwright.launch.tensorboard import serve

    raise typer.Exit(serve(directory, command, port))
