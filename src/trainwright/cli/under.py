"""``trainwright under``: run another launcher."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.cli.command import command


@command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def under(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="The launcher's command, such as torchrun ... -m trainwright.worker RECIPE."
        ),
    ],
) -> None:
    """Run torchrun, accelerate launch or another launcher, and end with the exit code of the run.

    These launchers end with 1 whatever their processes end with. Signals are passed on to the run.
    """
    from trainwright.run.program import run_launcher

    raise typer.Exit(run_launcher(command))
