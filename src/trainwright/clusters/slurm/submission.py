"""Put a job into Slurm's queue."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trainwright.clusters.job import Job
from trainwright.clusters.slurm import scheduler
from trainwright.clusters.slurm.job import directory_of, file_of, text
from trainwright.errors import RequestError
from trainwright.machine.sharing import lock_directory, remove_locked
from trainwright.run.shutdown.requests import (
    STATE_BYTES,
    forget_stops,
    seconds_to_stop,
    seconds_to_write,
    stop_was_requested,
)
from trainwright.utils.paths import write_file
from trainwright.utils.text import quoted

if TYPE_CHECKING:
    from trainwright.planning.plan import RunPlan

_OF_CPUS = re.compile(r"cpu|processor|configuration|limit", re.IGNORECASE)
_LOCK_SECONDS = 400.0  # longer than the scheduler's commands may take


class _InDoubt(RequestError):
    """The job may be in the queue."""


def completed(job: Job) -> Job:
    """Return the job with what Slurm knows of its nodes, if it can be asked."""
    settings = job.settings
    if settings.cpus_per_node is not None:
        return job
    with suppress(RequestError):
        cpus = scheduler.cpus_per_node(settings.partition, settings.gpus_per_node)
        return replace(job, settings=settings.model_copy(update={"cpus_per_node": cpus}))
    return job


def submit(job: Job, *, chosen: bool = False) -> list[str]:
    """Write the job's file and submit it as often as was asked; return the numbers of the jobs.

    Args:
        chosen: the number of its CPUs is that of `completed`.

    Raises:
        RequestError: there is no scheduler, it refuses the job, or another job of the run is in the queue, and nothing
            is left behind; or the scheduler did not answer, and the job may be in the queue.
    """
    _refuse_queued(job)
    try:
        directory_of(job).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{directory_of(job)} cannot be created: {error.strerror}") from None
    # Of several that submit one run at a time, the first does; the others find its job.
    with lock_directory(directory_of(job), f"{job.run} is being submitted by another process", _LOCK_SECONDS):
        file = file_of(job)
        before = file.read_bytes() if file.is_file() else None
        try:
            _refuse_queued(job)
            write_file(file, text(job))
            for run in job.runs():
                if stop_was_requested(run):  # which the end of the new job would take for a request to it
                    forget_stops(run, 0.0)
            return _submitted(job, chosen)
        except _InDoubt:  # what a job in the queue needs is left
            raise
        except OSError as error:
            _undo(job, before)
            raise RequestError(f"{file} cannot be written: {error.strerror}") from None
        except RequestError:
            _undo(job, before)
            raise


def _submitted(job: Job, chosen: bool) -> list[str]:
    numbers: list[str] = []
    try:
        for _ in range(job.settings.jobs or 1):
            numbers.append(scheduler.submit(file_of(job), *numbers[-1:]))
        return numbers
    except scheduler.SchedulerUnreachable as error:
        with suppress(RequestError):
            if job.settings.jobs in (None, 1):
                for job_in_queue in _queued(job):
                    return [job_in_queue.name.partition("_")[0]]
        raise _InDoubt(
            f"{error}; the job may be in the queue or get there: look with trainwright jobs, and if it is not there, "
            "submit the run again"
        ) from None
    except RequestError as error:
        if numbers:
            scheduler.cancel(_queued(job))
            raise RequestError(f"{error}; --jobs: so are canceled the {len(numbers)} that it took") from None
        if not chosen or not _OF_CPUS.search(str(error)):
            raise
        raise RequestError(
            f"{error}; --cpus-per-task={job.settings.cpus_per_node} was chosen from what Slurm says of its nodes: "
            "--cpus-per-node sets another number"
        ) from None


def _refuse_queued(job: Job) -> None:
    for other in _queued(job):
        raise RequestError(
            f"job {other.name} of {job.run} is in the queue already ({other.state.lower()}); submit the run again when "
            f"it has ended, or end it with: trainwright stop {quoted(job.run)}"
        )


def _queued(job: Job) -> list[scheduler.QueuedJob]:
    """Return the jobs in the queue that train the run, or of an array a run of it."""
    jobs = scheduler.queue(each=True)
    return [other for other in jobs if job.run in (other.run, other.array) and other.state != "COMPLETING"]


def _undo(job: Job, before: bytes | None) -> None:
    with suppress(OSError):
        if before is not None:
            write_file(file_of(job), before)
            return
        file_of(job).unlink(missing_ok=True)
        remove_locked(directory_of(job))
        job.run.rmdir()  # raises if a run is in it


def stop_warning(job: Job, plan: RunPlan) -> str | None:
    """Return a warning if Slurm kills the job before the planned run can stop after a checkpoint; otherwise None."""
    step, workload = plan.predicted().get("step_time"), plan.workload
    if step is None or (grace_period := scheduler.grace(job.settings.partition)) is None:
        return None
    # Of an adapter, a checkpoint is small.
    parameters = 0 if workload.model.is_partly_trained else workload.facts.total
    return grace_period.warning(seconds_to_stop(step, seconds_to_write(parameters * STATE_BYTES, directory_of(job))))
