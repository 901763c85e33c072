"""Stop a run that another process trains, or have it write a checkpoint."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.api.run import Run
from trainwright.errors import RequestError
from trainwright.machine.sharing import is_locked
from trainwright.run.ending.requests import CHECKPOINT_FILE, STOP_FILE, stop_was_requested
from trainwright.run.run_directory import RECIPE, SUBMITTED
from trainwright.utils.paths import run_path

if TYPE_CHECKING:
    from trainwright.clusters.slurm.scheduler import QueuedJob

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
    target = Run(run)
    if not is_locked(target.directory):
        file = target.directory / CHECKPOINT_FILE
        raise RequestError(f"{target.directory} is not being trained here; for another machine, create {file}")
    before = max(target.checkpoints, default=0)
    _touch(target.directory / CHECKPOINT_FILE)
    end = time.monotonic() + timeout
    while time.monotonic() < end and is_locked(target.directory):
        if (newest := max(target.checkpoints, default=0)) > before:
            return newest
        time.sleep(_LOOK_SECONDS)
    return None


def _touch(file: Path) -> None:
    try:
        # In a directory of others it may be a link, or a pipe.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}") from None


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
    from trainwright.clusters.slurm import scheduler

    directory = run.directory if isinstance(run, Run) else run_path(run)
    end = time.monotonic() + timeout
    if jobs := scheduler.jobs_of(directory):
        return _stop_jobs(directory, jobs, end)
    if (directory / SUBMITTED).is_dir() and not (directory / RECIPE).is_file():
        raise RequestError(f"{directory}: no job in the queue trains this run, or a run in this directory")
    target = Run(directory)
    if not is_locked(directory):
        raise RequestError(
            f"{directory} is not being trained here; for another machine, create {directory / STOP_FILE}"
        )
    _touch(directory / STOP_FILE)
    while is_locked(directory):
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_LOOK_SECONDS)
    return target.status


def _stop_jobs(directory: Path, jobs: Sequence[QueuedJob], end: float) -> str:
    """Stop the runs of jobs in the queue; return what has become of them.

    Args:
        directory: of the run, or of an array's runs.
        end: how long to wait, by the monotonic clock.
    """
    from trainwright.clusters.slurm import scheduler

    ends: dict[Path, str] = {}
    stopped_before: set[tuple[str, bool]] = set()
    while jobs:
        new = [
            job for job in jobs if (job.name, job.waits) not in stopped_before
        ]  # a job may begin, or wait again, meanwhile
        running = [job for job in jobs if not job.waits and (job.run / RECIPE).is_file()]
        started = [job for job in new if job in running]
        scheduler.cancel([job for job in new if job not in started])
        scheduler.forbid_requeue(started)
        for job in running:  # a start that is not this far yet forgets what was asked before it
            if job in started or not stop_was_requested(job.run):
                _touch(job.run / STOP_FILE)
        stopped_before |= {(job.name, job.waits) for job in new}
        ends |= {job.run: "canceled" for job in new if job not in started} | {job.run: "" for job in started}
        if all(job.waits for job in jobs):
            break
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_ASK_SECONDS)
        jobs = scheduler.jobs_of(directory)
    statuses = [said or Run(run).status for run, said in ends.items()]
    counts = ", ".join(f"{count} {said}" for said, count in Counter(statuses).most_common())
    return statuses[0] if [*ends] == [directory.absolute()] else counts
