"""``trainwright verify``: prove that a recipe gives the same run on several processes as on one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.activity import Activity, doing
from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import EXIT_TRAINING, RequestError

if TYPE_CHECKING:
    from trainwright.launch.accelerate.meaning import Meaning


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 5,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take processes, strategy and the like from this Accelerate file."),
    ] = None,
) -> None:
    """Compare a few steps on one process with the recipe's strategy and processes, on this machine.

    Losses and gradient norms are shown side by side; nothing is written under runs/.
    Ends with 0: the same run, 4: they part or a side failed, 2: wrong request, 3: unfit machine, 75: stopped.
    """
    from trainwright.launch.environment import refuse_worker
    from trainwright.launch.request import check_request, read_request, resolve_request
    from trainwright.machine.accelerators import with_device
    from trainwright.machine.detect import detect

    refuse_worker("verify")
    words = [str(recipe), *(overrides or [])]
    meaning = None if accelerate_config is None else _meaning(accelerate_config, words)
    with Activity(sys.stderr, "planning"):
        request = read_request(words, None, meaning)
        machine = with_device(detect(), request.recipe.parallel.device)
        resolved = resolve_request(request, machine).recipe
        # Before the first side runs: nobody wants to wait for that and hear then that the second one cannot.
        check_request(request, resolved, creates=False)
        doing("importing torch and transformers")
        from trainwright.doctor.verify import verify as compare
        from trainwright.worker import prepare

    if not compare(resolved, machine, steps, prepare, sys.stdout).is_same:
        raise typer.Exit(EXIT_TRAINING)


def _meaning(file: Path, words: list[str]) -> Meaning:
    from trainwright.launch.accelerate.recipe import meaning_here

    alone = any(word.startswith("parallel.num_processes=") for word in words)
    meaning = meaning_here(file, words, nodes=1 if alone else None)
    if meaning.nodes > 1:
        raise RequestError(
            f"{file}: num_machines is {meaning.nodes}, and verify compares on this machine alone; say on how many "
            "processes: parallel.num_processes=2"
        )
    return meaning
