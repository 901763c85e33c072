"""Simulating a run: the product's own code on GPUs that are not there."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.api.processes.separate import run_in_process
from trainwright.api.recipe import Recipe, source_of
from trainwright.simulation.report import Simulation

if TYPE_CHECKING:
    from trainwright.simulation.start import Asked


def simulate(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    on: str,
    steps: int = 2,
    force: bool = False,
    progress: bool = False,
    accelerate_config: str | PathLike[str] | None = None,
) -> Simulation:
    """Run a recipe on simulated GPUs, from the first step to the export; what ``trainwright train --simulate`` does.

    Nothing is computed, no GPU is needed, and no weights are read: tensors have shapes, dtypes and devices, but no
    memory. One rank is simulated, rank 0 of a world of any size. It finds operations that mix devices or dtypes, and
    gives the peak memory of every phase, the collectives, and where the host waits for the device.

    Args:
        recipe: a `Recipe`, or the path of a recipe file.
        overrides: ``section.key=value``, the value in YAML.
        on: the machine, such as ``8xH100`` or ``128x8xH100``, or a file of ``trainwright machine --json``.
        steps: optimizer steps to take; from the second one on, they are alike.
        force: simulate even if the plan says that the run does not fit.
        progress: show what is being done.
        accelerate_config: a file of ``accelerate config``, for the number of processes, the strategy and so on.

    Raises:
        RequestError: the recipe or the machine is wrong.
        MachineError: the recipe does not fit the machine, or there is no C++ compiler here.

    Examples:
        >>> import trainwright as tw
        >>> tw.simulate("tiny.yaml", on="8xH1000")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: --simulate: H1000: no such card in the catalog...
    """
    from trainwright.simulation.start import Asked

    file = None if accelerate_config is None else Path(accelerate_config)
    return run_in_process(_in_words, Asked(source_of(recipe), overrides, on, steps, force, file), progress=progress)


def _in_words(asked: Asked) -> Simulation:
    import sys

    from trainwright.activity import Activity
    from trainwright.simulation.start import simulate as start

    with Activity(sys.stderr, "reading the recipe"):
        return start(asked)
