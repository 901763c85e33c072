"""From a recipe and a command's options to a job: the run that it trains, and what it asks its cluster for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.clusters.settings import ClusterSettings, settings_of
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.run import run_directory

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
    settings: ClusterSettings

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
    directory_key = plain.logging.run_directory
    _check_directory(directory_key, load_recipe(recipe, _first(overrides, settings.array)).logging.run_directory, name)
    run = run_directory.own_directory(directory_key, name or run_directory.stem_of(recipe)).absolute()
    remaining = tuple(each for each in overrides if not each.startswith(_DIRECTORY))
    job = Job(run, recipe.absolute(), remaining, settings)
    if settings.array is None:
        run_directory.check_not_started(run)
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


def _check_directory(directory_key: str, of_first: str, name: str | None) -> None:
    """Raise RequestError for a directory that is not that of the run, or of an array's runs.

    Args:
        directory_key: ``logging.run_directory``, without the overrides that contain ``{element}``.
        of_first: the same of the first element.
    """
    if ELEMENT in directory_key or of_first != directory_key:
        raise RequestError(
            f"logging.run_directory: {ELEMENT} is not replaced in it; write the directory of all runs, in which that "
            "of each element is named by its index"
        )
    if name is not None and directory_key != "auto":
        raise RequestError(
            f"--name: is the name of a run in {run_directory.RUNS}, but logging.run_directory is {directory_key}, "
            "whose last part is the name of its run and job; remove --name, or set logging.run_directory=auto"
        )


def _first(overrides: Sequence[str], array: str | None) -> list[str]:
    if array is None:
        return list(overrides)
    first = re.split(r"[-,%:]", array, maxsplit=1)[0]
    return [each.replace(ELEMENT, first) for each in overrides]


# What decides how a run computes and where it finds its files, by name: a list of what to leave out would let through
# the secrets that nobody thought of. Libraries of kernels and communication have settings only.
_PASSED = re.compile(
    r"(TORCH|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|OMP|MKL|TRITON|UCX|FI|DS)_\w+|"
    r"HF_(HOME|ENDPOINT|ASSETS_CACHE|MODULES_CACHE|DATASETS_(CACHE|OFFLINE)|XET_(CACHE|HIGH_PERFORMANCE)|"
    r"HUB_(CACHE|OFFLINE|DISABLE_XET|DOWNLOAD_TIMEOUT|ETAG_TIMEOUT))|"
    r"TRANSFORMERS_(CACHE|OFFLINE|VERBOSITY)|"
    r"TRAINWRIGHT_(CACHE|MACHINE|QUIET|GRACE_SECONDS|EXIT_CODES|FAULT|FAULT_TRIAL)|"
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TMPDIR"
)
_SECRET = re.compile(r"(^|_)(AUTH|CREDENTIALS?|KEY|PASS|PASSWD|PASSWORD|PAT|SECRET|TOKEN)(_|$)")
_LOGIN = re.compile(r"://[^/\s]*@")  # the user and the password in a URL


def captured(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values decide how a run computes and where it finds its files, without secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _PASSED.fullmatch(name) and not _SECRET.search(name) and not _LOGIN.search(value)
    }


GRACE = "TRAINWRIGHT_GRACE_SECONDS"


def stop_warning(needed: float) -> str | None:
    """Return a warning if the variable GRACE gives this process less time than a stop needs; otherwise None.

    Args:
        needed: the seconds from a signal to the end of the run, with a step and a checkpoint.
    """
    grace = os.environ.get(GRACE, "")
    if not grace.isdigit() or needed <= int(grace):
        return None
    return (
        f"a stop takes about {needed:.0f} s (step, checkpoint, end), and the cluster kills the run {grace} s after its "
        "signal: what was done since the last checkpoint is done again; submit with a longer launch.grace, or set "
        "checkpoint.every so that this is little"
    )
