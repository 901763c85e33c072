"""Stop a run that another process trains, or have it write a checkpoint."""

from __future__ import annotations

import time
from os import PathLike

from trainwright.api.run import Run
from trainwright.errors import RequestError
from trainwright.machine.sharing import is_locked
from trainwright.recipe.registries import STOP_HOOKS
from trainwright.run.run_directory import RECIPE, SUBMITTED
from trainwright.run.shutdown.requests import CHECKPOINT_FILE, STOP_FILE, ask
from trainwright.utils.paths import run_path

_LOOK_SECONDS = 0.2


def checkpoint(run: Run | str | PathLike[str], timeout: float = 600.0) -> int | None:
    """Ask a run to write a checkpoint after its current step and to go on; what ``trainwright checkpoint`` does.

    Args:
        run: a run that is training, or its directory.
        timeout: how many seconds to wait until the checkpoint is complete.

    Returns:
        The step of the checkpoint; None after the timeout, or if the run has ended.

    Raises:
        RequestError: no process of this machine trains the run, or the request cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> tw.checkpoint("runs/tiny")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: runs/tiny is not being trained here; for another machine, create ...
    """
    target = Run(run)
    if not is_locked(target.directory):
        file = target.directory / CHECKPOINT_FILE
        raise RequestError(f"{target.directory} is not being trained here; for another machine, create {file}")
    before = max(target.checkpoints, default=0)
    ask(target.directory / CHECKPOINT_FILE)
    end = time.monotonic() + timeout
    while time.monotonic() < end and is_locked(target.directory):
        if (newest := max(target.checkpoints, default=0)) > before:
            return newest
        time.sleep(_LOOK_SECONDS)
    return None


def stop(run: Run | str | PathLike[str], timeout: float = 600.0) -> str:
    """Ask a run to stop after its current step, with a checkpoint; what ``trainwright stop`` does.

    Args:
        run: a run that is training, or its directory.
        timeout: how many seconds to wait until it has ended.

    A job of Slurm that trains the run ends too, and is not requeued; one that still waits is canceled. With the
    directory of an array's runs, this is so for each element that is in the queue.

    Returns:
        ``stopped``, ``finished`` (it ended first), ``unfinished`` (it failed), ``canceled`` (its job was waiting), or
        ``stopping`` after the timeout. Of an array, how many runs are what: ``4 stopped, 6 canceled``.

    Raises:
        RequestError: no process trains the run, or the request cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> tw.stop("runs/tiny")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: runs/tiny is not being trained here; for another machine, create runs/tiny/stop
    """
    directory = run.directory if isinstance(run, Run) else run_path(run)
    end = time.monotonic() + timeout
    for stop_jobs in STOP_HOOKS.present():
        if (outcome := stop_jobs(directory, timeout)) is not None:
            return outcome
    if (directory / SUBMITTED).is_dir() and not (directory / RECIPE).is_file():
        raise RequestError(f"{directory}: no job in the queue trains this run, or a run in this directory")
    target = Run(directory)
    if not is_locked(directory):
        raise RequestError(
            f"{directory} is not being trained here; for another machine, create {directory / STOP_FILE}"
        )
    ask(directory / STOP_FILE)
    while is_locked(directory):
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_LOOK_SECONDS)
    return target.status
