"""Put a job into Slurm's queue."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from trainwright.errors import RequestError
from trainwright.launch.clusters.job import Job
from trainwright.launch.slurm import scheduler
from trainwright.launch.slurm.job import directory_of, file_of, text
from trainwright.paths import write_file


def submit(job: Job) -> tuple[str, Job]:
    """Write the job's file and submit it; return the job's number, and the job as it was submitted.

    Raises:
        RequestError: there is no scheduler, it refuses the job, or another job of the run is in the queue. Nothing is
            left behind.
    """
    for other in scheduler.queue():
        if job.run in (other.run, other.run.parent) and other.state != "COMPLETING":
            raise RequestError(
                f"job {other.name} of {job.run} is in the queue already ({other.state.lower()}); submit the run again "
                f"when it has ended, or end it with scancel {other.name}"
            )
    settings = job.settings
    if settings.cpus_per_node is None:
        cpus = scheduler.cpus_per_node(settings.partition, settings.gpus_per_node)
        job = replace(job, settings=settings.model_copy(update={"cpus_per_node": cpus}))
    file, written = file_of(job), text(job)
    before = file.read_bytes() if file.is_file() else None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, written)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}") from None
    try:
        return scheduler.submit(file), job
    except RequestError:
        _undo(job, before)
        raise


def _undo(job: Job, before: bytes | None) -> None:
    with suppress(OSError):
        if before is not None:
            write_file(file_of(job), before)
            return
        file_of(job).unlink()
        directory_of(job).rmdir()
        job.run.rmdir()  # raises if a run is in it
