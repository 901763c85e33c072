"""Stop a run that another process trains, or have it write a checkpoint."""

from __future__ import annotations

import time
from os import PathLike
from pathlib import Path

from trainwright.api.run import Run
from trainwright.errors import RequestError
from trainwright.launch.ending.requests import CHECKPOINT_FILE, STOP_FILE
from trainwright.machine.sharing.file_lock import is_locked
from trainwright.paths import run_path

_LOOK_SECONDS, _ASK_SECONDS = 0.2, 2.0  # the second: the scheduler


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
    found = Run(run)
    if not is_locked(found.directory):
        file = found.directory / CHECKPOINT_FILE
        raise RequestError(f"{found.directory} is not being trained here; for another machine, create {file}")
    before = max(found.checkpoints, default=0)
    _touch(found.directory / CHECKPOINT_FILE)
    end = time.monotonic() + timeout
    while time.monotonic() < end and is_locked(found.directory):
        if (newest := max(found.checkpoints, default=0)) > before:
            return newest
        time.sleep(_LOOK_SECONDS)
    return None


def _touch(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}") from None


def stop(run: Run | str | PathLike[str], timeout: float = 600.0) -> str:
    """Ask a run to stop after its current step, with a checkpoint; what ``trainwright stop`` does.

    Args:
        run: a run that is training, or its directory.
        timeout: how many seconds to wait until it has ended.

    A job of Slurm that trains the run ends too, and is not requeued; one that still waits is canceled.

    Returns:
        ``stopped``, ``finished`` (it ended first), ``unfinished`` (it failed), ``canceled`` (its job was waiting), or
        ``stopping`` after the timeout.

    Raises:
        RequestError: no process trains the run, or the request cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> tw.stop("runs/tiny")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: runs/tiny is not being trained here; for another machine, create runs/tiny/stop
    """
    from trainwright.launch.slurm import scheduler

    job = scheduler.job_of(run.directory if isinstance(run, Run) else run_path(run))
    if job is not None:
        scheduler.end(job)
        if job.state == "PENDING":
            return "canceled"
    found = Run(run)
    if job is None and not is_locked(found.directory):
        raise RequestError(
            f"{found.directory} is not being trained here; for another machine, create {found.directory / STOP_FILE}"
        )
    _touch(found.directory / STOP_FILE)
    end = time.monotonic() + timeout
    while is_locked(found.directory) or (job is not None and scheduler.job_of(found.directory) is not None):
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_LOOK_SECONDS if job is None else _ASK_SECONDS)
    return found.status
