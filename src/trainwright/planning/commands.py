"""``trainwright plan``: what fits, how fast and why, before anything is launched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.command import NamesInHelp, TrustCode, command
from trainwright.errors import EXIT_MACHINE
from trainwright.utils.text import find_terminal_width, say


@command(cls=NamesInHelp)
def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [SECTION.KEY=VALUE]...",
            help="The recipe to plan, and overrides; or pass --model instead.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Plan without a recipe, for a known model, a model directory or a config.json."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="With --model: tokens per row. Default: 2048, or the model's context length if shorter."
        ),
    ] = None,
    global_batch_size: Annotated[int, typer.Option(min=1, help="With --model: rows per optimizer step.")] = 64,
    steps: Annotated[int | None, typer.Option(min=1, help="With --model: number of optimizer steps.")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Plan for this machine instead of the current one, such as 8xH100 or 4x8xA100-40GB, or a FILE.json "
            "written by `trainwright machine --json`.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="BUDGET", help="Number of training tokens, such as 300B, or 20x for 20 per parameter."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="With --tokens: price of a device per hour, in any currency.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show all candidates.")] = False,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write a chart of the memory by part to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Show what fits, how fast it is and why, and the values chosen for `auto`.

    Ends with 0: something fits, 2: wrong request, 3: nothing fits.
    """
    import trainwright as tw
    from trainwright.recipe.loading import split_words

    recipe, overrides = split_words(arguments or [])
    run_plan = tw.plan(
        recipe,
        *overrides,
        model=model,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        steps=steps,
        on=on,
        tokens=tokens,
        price=price,
        progress=True,
    )
    if chart is not None:
        run_plan.draw(chart)
    if as_json:
        import json

        say(json.dumps(run_plan.as_json(), indent=2), wrap=False)
    else:
        for line in run_plan.lines(compare, find_terminal_width(sys.stdout) if sys.stdout.isatty() else None):
            say(line)
    if not run_plan.fits:
        raise typer.Exit(EXIT_MACHINE)
