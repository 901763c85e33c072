"""``trainwright tensorboard``: the curves of runs in a browser, alone or while a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows the directory belongs to the other command


class TensorboardCommand(TyperCommand):
    """Take the options between the directory and the other command too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with the options before the directory."""
        end = 1
        while args[:1] and not args[0].startswith("-") and args[end : end + 1] and args[end].startswith("-"):
            end += 2 if args[end] == "--port" else 1
        return super().parse_args(ctx, [*args[1:end], *args[:1], *args[end:]])


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
