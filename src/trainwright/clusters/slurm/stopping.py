"""Stop the jobs of Slurm that train a run: those that wait are canceled, the others end after a checkpoint."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from trainwright.api.run import Run
from trainwright.clusters.slurm import scheduler
from trainwright.run.run_directory import RECIPE
from trainwright.run.shutdown.requests import STOP_FILE, ask, stop_was_requested

_ASK_SECONDS = 2.0


def stop_jobs(directory: Path, seconds: float) -> str | None:
    """Stop the jobs in the queue that train a run; return what has become of them, None if there are none.

    Args:
        directory: of the run, or of an array's runs.
        seconds: how long to wait.
    """
    jobs, end = scheduler.jobs_of(directory), time.monotonic() + seconds
    if not jobs:
        return None
    ends: dict[Path, str] = {}
    stopped_before: set[tuple[str, bool]] = set()
    while jobs:
        # A job may begin, or wait again, meanwhile.
        new = [job for job in jobs if (job.name, job.waits) not in stopped_before]
        running = [job for job in jobs if not job.waits and (job.run / RECIPE).is_file()]
        started = [job for job in new if job in running]
        scheduler.cancel([job for job in new if job not in started])
        scheduler.forbid_requeue(started)
        for job in running:  # a start that is not this far yet forgets what was asked before it
            if job in started or not stop_was_requested(job.run):
                ask(job.run / STOP_FILE)
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
