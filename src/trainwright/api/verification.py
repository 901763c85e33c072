"""Verification that a recipe gives the same run on several processes as on one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.activity import Activity, doing
from trainwright.api.processes.separate import run_in_process
from trainwright.api.recipe import Recipe, source_of
from trainwright.doctor.comparison import Comparison
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from trainwright.launch.accelerate.translation import Translation
    from trainwright.recipe.yaml_text import Tree


def verify(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    steps: int = 5,
    accelerate_config: str | PathLike[str] | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare a few steps on one process with the recipe's strategy and processes; what ``trainwright verify`` does.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        steps: optimizer steps to compare.
        accelerate_config: a file of ``accelerate config``, for the number of processes, the strategy and so on.
        progress: show both runs and the table.

    Returns:
        The steps of both: `Comparison.is_same`, and as text `Comparison.verdict`.

    Raises:
        RequestError: the recipe is invalid, or runs on one process.
        MachineError: the machine does not support one of the two runs.
        TrainingError: one of the two runs failed.

    Examples:
        >>> import trainwright as tw
        >>> tw.verify("tiny.yaml", "parallel.strategy=single")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: parallel.strategy: this recipe runs on one process here (single), ...
    """
    config = None if accelerate_config is None else Path(accelerate_config)
    return run_in_process(compare, VerifyRequest(source_of(recipe), overrides, steps, config), progress=progress)


@dataclass(frozen=True)
class VerifyRequest:
    """A request to compare, with the number of steps."""

    recipe: Path | Tree
    overrides: tuple[str, ...] = ()
    steps: int = 5
    accelerate_config: Path | None = None


def compare(options: VerifyRequest) -> Comparison:
    """Run both sides and show them on standard output. Changes this process."""
    from trainwright.launch.group.environment import refuse_worker
    from trainwright.launch.request import check_request, request_of, resolve_request
    from trainwright.machine.accelerators import with_device
    from trainwright.machine.detect import detect

    refuse_worker("verify")
    translation = (
        None if options.accelerate_config is None else _translation(options.accelerate_config, options.overrides)
    )
    with Activity(sys.stderr, "planning"):
        request = request_of(options.recipe, list(options.overrides), None, translation)
        # Check the second side before the first one runs, so that the user does not wait in vain.
        check_request(request, creates=False)
        machine = with_device(detect(), request.recipe.parallel.device)
        resolved = resolve_request(request, machine).recipe
        doing("importing torch and transformers")
        from trainwright.doctor.verify import verify as compared

    return compared(resolved, machine, options.steps, sys.stdout)


def _translation(file: Path, overrides: tuple[str, ...]) -> Translation:
    from trainwright.launch.accelerate.recipe import find_translation

    alone = any(word.startswith("parallel.num_processes=") for word in overrides)
    translation = find_translation(file, overrides, nodes=1 if alone else None)
    if translation.nodes > 1:
        raise RequestError(
            f"{file}: num_machines is {translation.nodes}, but verify uses this machine only; set the number of "
            "processes: parallel.num_processes=2"
        )
    return translation
