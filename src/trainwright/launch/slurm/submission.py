"""From a recipe and a command's options to a job in Slurm's queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.launch import run_directory
from trainwright.launch.ending.requests import STATE_BYTES, seconds_to_stop, seconds_to_write
from trainwright.launch.slurm import scheduler
from trainwright.launch.slurm.job import ELEMENT, Job, check_name, with_element
from trainwright.launch.slurm.settings import settings_of
from trainwright.machine.file_lock import lock_directory
from trainwright.paths import write_file
from trainwright.recipe.loading import load_recipe

if TYPE_CHECKING:
    from trainwright.planning.plan import Plan

_DIRECTORY = "logging.run_directory="
_LOCK_SECONDS = 120.0  # longer than the scheduler's commands may take


def job_of(recipe: Path, overrides: Sequence[str], options: Mapping[str, Any], to: str | None, name: str | None) -> Job:
    """Return the job that trains a recipe.

    Args:
        overrides: with an array, they may contain ``{element}``.
        options: of the command, by the keys of the section ``launch``; None is not given.
        to: ``slurm``, or a cluster of clusters.yaml.
        name: of the run; None: the directory that the recipe names, or runs/ and the recipe's name.

    Raises:
        RequestError: the recipe, the options or the name are invalid.
    """
    if name is not None:
        check_name(name)
    plain = load_recipe(recipe, [each for each in overrides if ELEMENT not in each])
    settings = settings_of(plain, options, to)
    if settings.array is None and len(overrides) != sum(ELEMENT not in each for each in overrides):
        raise RequestError(f"{ELEMENT} in an override is the index in an array; pass --array, such as --array 0-9")
    wanted = plain.logging.run_directory if name is None else "auto"
    run = run_directory.own_directory(wanted, name or run_directory.stem_of(recipe)).absolute()
    kept = tuple(each for each in overrides if not each.startswith(_DIRECTORY))
    job = Job(run, recipe.absolute(), kept, settings)
    job.check()
    load_recipe(recipe, first_overrides(job))
    if settings.array is None:
        run_directory.check_unbegun(run)
    return job


def first_overrides(job: Job) -> list[str]:
    """Return the overrides of the run; of an array, of the run of its first element."""
    array = job.settings.array
    return list(job.overrides) if array is None else with_element(job.overrides, array)


def submit(job: Job) -> tuple[str, Job]:
    """Write the job's file and submit it; return the job's number, and the job as it was submitted.

    Raises:
        RequestError: there is no scheduler, it refuses the job, or another job of the run is in the queue. Nothing is
            left behind.
    """
    _refuse_queued(job)
    settings = job.settings
    if settings.cpus_per_node is None:
        cpus = scheduler.cpus_per_node(settings.partition, settings.gpus_per_node)
        job = replace(job, settings=settings.model_copy(update={"cpus_per_node": cpus}))
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{job.directory} cannot be created: {error.strerror}") from None
    # Of several that submit one run at a time, the first does; the others find its job.
    with lock_directory(job.directory, f"{job.run} is being submitted by another process", _LOCK_SECONDS):
        before = job.file.read_bytes() if job.file.is_file() else None
        try:
            _refuse_queued(job)
            write_file(job.file, job.text())
            return scheduler.submit(job.file), job
        except OSError as error:
            _undo(job, before)
            raise RequestError(f"{job.file} cannot be written: {error.strerror}") from None
        except RequestError:
            _undo(job, before)
            raise


def _refuse_queued(job: Job) -> None:
    for other in scheduler.queue():
        if job.run in (other.run, other.run.parent) and other.state != "COMPLETING":
            raise RequestError(
                f"job {other.name} of {job.run} is in the queue already ({other.state.lower()}); submit the run again "
                f"when it has ended, or end it with scancel {other.name}"
            )


def _undo(job: Job, before: bytes | None) -> None:
    with suppress(OSError):
        if before is not None:
            write_file(job.file, before)
            return
        job.file.unlink(missing_ok=True)
        job.directory.rmdir()
        job.run.rmdir()  # raises if a run is in it


def stop_warning(job: Job, plan: Plan) -> str | None:
    """Return a warning if Slurm kills the job before the planned run can stop after a checkpoint; otherwise None."""
    step, workload = plan.predicted().get("step_time"), plan.workload
    if step is None or (given := scheduler.grace(job.settings.partition)) is None:
        return None
    # Of an adapter, a checkpoint is small.
    whole = workload.adapter is None and workload.trained is None
    parameters = workload.architecture.parameters().total if whole else 0
    return given.warning(seconds_to_stop(step, seconds_to_write(parameters * STATE_BYTES)))
