"""``trainwright drill``: recovery from faults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import EXIT_TRAINING, RequestError
from trainwright.utils.text import choose_table_width, say


def drill(
    recipe: RecipeFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Must not exist. Default: drills/<recipe>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the drill in the output directory.")] = False,
    seed: Annotated[int, typer.Option(help="Draws the kinds, moments, ranks and places of the faults.")] = 0,
    tries: Annotated[
        int | None, typer.Option(help="How many faults. Default: one of each kind, or as many as --minutes allows.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no fault after this time.")] = None,
    kinds: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Only kinds of faults with such names; repeatable.")
    ] = None,
    strategies: Annotated[
        str, typer.Option(metavar="NAME,NAME…", help="Default: the recipe's, or all that need no other library.")
    ] = "",
    processes: Annotated[str, typer.Option(metavar="N,N…", help="Numbers of processes. Default: 1,2.")] = "",
    jobs: Annotated[int, typer.Option(help="How many faults at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Inject faults into short runs of a recipe, and compare each run with the undisturbed one.

    Processes are killed and signalled at every phase, disks fill up, checkpoints are damaged, numbers go wrong. Ends
    with 0: everything that could be tried held, 4: a trial is broken or missed, or none could be tried, 2: wrong
    request, 3: this machine cannot do it, 75: stopped.
    """
    import trainwright as tw

    outcome = tw.drill(
        recipe,
        *(overrides or []),
        output=output,
        seed=seed,
        tries=tries,
        minutes=minutes,
        kinds=kinds or (),
        strategies=_split_words(strategies),
        processes=_parse_numbers(processes),
        jobs=jobs,
        resume=resume,
        progress=True,
    )
    if as_json:
        import json

        say(json.dumps(outcome.values(), indent=2), wrap=False)
    else:
        say(f"{outcome.table(choose_table_width(sys.stdout))}\n\n{outcome.directory}/", wrap=False)
    if not outcome.held:
        raise typer.Exit(EXIT_TRAINING)


def _split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _split_words(text)]
    except ValueError:
        raise RequestError(f"--processes {text}: expected numbers separated by commas") from None
