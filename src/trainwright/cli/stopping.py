"""``trainwright stop`` and ``checkpoint``: requests to runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.utils.text import say


def stop(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The run's directory, or that of an array's runs.", show_default=False),
    ],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until the run has ended; 0: do not wait.")
    ] = 600.0,
) -> None:
    """Stop a run after its current step, with a checkpoint.

    A job of Slurm that trains it ends too, and is not requeued; one that waits is canceled. Otherwise the same as
    creating the file RUN/stop, which works from another machine too. An evaluation is interrupted,
    and repeated when the run is resumed.
    """
    import trainwright as tw

    say(f"{run}: {tw.stop(run, timeout=timeout)}")


def checkpoint(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.", show_default=False)],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for the checkpoint; 0: do not wait.")
    ] = 600.0,
) -> None:
    """Have a run write a checkpoint after its current step, and go on.

    The same as creating the file RUN/checkpoint, which works from another machine too.
    """
    import trainwright as tw

    step = tw.checkpoint(run, timeout=timeout)
    say(f"{run}: {'asked for a checkpoint' if step is None else f'checkpoint of step {step}'}")
