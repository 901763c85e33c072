"""From a recipe and a command's options to a job: the run that it trains, and what it asks its cluster for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.launch import run_directory
from trainwright.launch.clusters.settings import Cluster, settings_of
from trainwright.recipe.loading import load_recipe

ELEMENT = "{element}"
_DIRECTORY = "logging.run_directory="
_NAME = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class Job:
    """A job that trains one run; with an array, one run for each element.

    Attributes:
        run: the directory of the run, or of the runs of an array; absolute.
        recipe: absolute.
    """

    run: Path
    recipe: Path
    overrides: tuple[str, ...]
    settings: Cluster

    def runs(self) -> Iterator[Path]:
        """Yield the directory of each run: one, or those of an array's elements."""
        if self.settings.array is None:
            yield self.run
            return
        for part in self.settings.array.partition("%")[0].split(","):
            first, last, step = (*re.split("[-:]", part), "", "")[:3]
            for index in range(int(first), int(last or first) + 1, int(step or 1)):
                yield self.run / str(index)

    @property
    def name(self) -> str:
        """The job's name, as the scheduler shows it."""
        return re.sub(r"[^\w.+-]", "-", self.run.name, flags=re.ASCII)


def job_of(recipe: Path, overrides: Sequence[str], options: Mapping[str, Any], to: str | None, name: str | None) -> Job:
    """Return the job that trains a recipe.

    Args:
        overrides: with an array, they may contain ``{element}``.
        options: of the command, by the keys of the section ``launch``; None is not given.
        to: a scheduler, or a cluster of clusters.yaml.
        name: of the run in runs/; None: the directory that the recipe names, or runs/ and the recipe's name.

    Raises:
        RequestError: the recipe, the options or the name are invalid.
    """
    if name is not None:
        check_name(name)
    plain = load_recipe(recipe, [each for each in overrides if ELEMENT not in each])
    settings = settings_of(plain, options, to)
    if settings.array is None and len(overrides) != sum(ELEMENT not in each for each in overrides):
        raise RequestError(f"{ELEMENT} in an override is the index in an array; pass --array, such as --array 0-9")
    wanted = plain.logging.run_directory
    _check_directory(wanted, load_recipe(recipe, _first(overrides, settings.array)).logging.run_directory, name)
    run = run_directory.own_directory(wanted, name or run_directory.stem_of(recipe)).absolute()
    kept = tuple(each for each in overrides if not each.startswith(_DIRECTORY))
    job = Job(run, recipe.absolute(), kept, settings)
    if settings.array is None:
        run_directory.check_unbegun(run)
    return job


def first_overrides(job: Job) -> list[str]:
    """Return the overrides of the run; of an array, of the run of its first element."""
    return _first(job.overrides, job.settings.array)


def check_name(name: str) -> None:
    """Raise RequestError for a name that is not plain."""
    if not _NAME.fullmatch(name) or name.startswith(("-", ".")):
        raise RequestError(
            f"--name: {name!r} is not a plain name of a run and its job; use letters, digits, '.', '_', '+' and '-'"
        )


def _check_directory(wanted: str, of_first: str, name: str | None) -> None:
    """Raise RequestError for a directory that is not that of the run, or of an array's runs.

    Args:
        wanted: ``logging.run_directory``, without the overrides that contain ``{element}``.
        of_first: the same of the first element.
    """
    if ELEMENT in wanted or of_first != wanted:
        raise RequestError(
            f"logging.run_directory: {ELEMENT} is not replaced in it; write the directory of all runs, in which that "
            "of each element is named by its index"
        )
    if name is not None and wanted != "auto":
        raise RequestError(
            f"--name: is the name of a run in {run_directory.RUNS}, but logging.run_directory is {wanted}, whose last "
            "part is the name of its run and job; remove --name, or set logging.run_directory=auto"
        )


def _first(overrides: Sequence[str], array: str | None) -> list[str]:
    if array is None:
        return list(overrides)
    first = re.split(r"[-,%:]", array, maxsplit=1)[0]
    return [each.replace(ELEMENT, first) for each in overrides]
