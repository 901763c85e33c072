"""The end of a job: put it back into the queue if the run is to go on, otherwise end with the run's exit code.

    python -m trainwright.clusters.slurm.requeue RUN CODE [--until-done] [--series]

Slurm itself requeues no job that ends within the grace of a preemption: it counts as failed, unless its code is 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from trainwright.clusters.job_attempts import MOST_FAILURES, failures_in_a_row, may_continue
from trainwright.clusters.slurm import scheduler
from trainwright.engine.event_reader import status_of
from trainwright.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_STOPPED, RequestError
from trainwright.run.run_directory import SUBMITTED
from trainwright.run.shutdown.requests import STOP_FILE, stop_was_requested
from trainwright.run.shutdown.stop import scheduler_job
from trainwright.utils.text import say

T = TypeVar("T")
_STATE = "requeues.json"
_AGAIN_SECONDS, _PATIENCE_SECONDS = 5.0, 900.0  # while Slurm's controller does not answer


def main() -> None:
    """Requeue the job, or exit with the code of the run."""
    parser = argparse.ArgumentParser(prog="python -m trainwright.clusters.slurm.requeue", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("code", type=int)
    parser.add_argument("--until-done", action="store_true", help="also after a time limit")
    parser.add_argument("--series", action="store_true", help="other jobs of the run follow, if it goes on")
    options = parser.parse_args()
    job = scheduler_job()
    if job is None:
        parser.error("this ends a job of Slurm, and SLURM_JOB_ID is not set")
    if options.code == EXIT_FINISHED and status_of(options.run) != "finished":
        # srun does not know the code of a task whose slurmstepd has died.
        say(f"{options.run} has not finished, though srun ended with exit code 0: a machine failed", file=sys.stderr)
        options.code = EXIT_FAULT
    try:
        if options.series and (not may_continue(options.code) or stop_was_requested(options.run)):
            _cancel_later(options.run)
        anyway = options.until_done or options.code != EXIT_STOPPED  # a fault of a machine
        if may_continue(options.code) and stop_was_requested(options.run):
            say(f"job {job} is not requeued: {options.run / STOP_FILE} asked the run to stop", file=sys.stderr)
        elif may_continue(options.code):
            reason = _why_not(_answered(lambda: scheduler.shown(job)), anyway)
            said = (
                _requeued(job, options.run, options.code) if reason is None else f"job {job} is not requeued: {reason}"
            )
            say(said, file=sys.stderr)
    except RequestError as error:
        say(f"job {job} is not requeued: {error}", file=sys.stderr)
    sys.exit(options.code)


def _cancel_later(run: Path) -> None:
    """Cancel the jobs that were to go on with the run; one that starts nevertheless ends as the run does."""
    later = [job for job in _answered(lambda: scheduler.jobs_of(run)) if job.waits]
    scheduler.cancel(later)
    if later:
        names = ", ".join(job.name for job in later)
        say(f"the run does not go on, so its later jobs are canceled: {names}", file=sys.stderr)


def _why_not(job: Mapping[str, str], anyway: bool) -> str | None:
    """Return why not to requeue the job; None: requeue it, as it was preempted or is to go on ``anyway``."""
    if not job:
        return "Slurm does not know it"
    runs = job.get("JobState") == "RUNNING"
    # A job whose grace is over is completing, as one that a user has canceled or requeued. The time may be that of an
    # earlier start.
    preempted = job.get("PreemptTime", "None")
    if preempted != "None" and preempted >= job.get("StartTime", "") and (runs or _is_grace_over(job, preempted)):
        return None
    if not runs and job.get("Reason") != "TimeLimit":
        return f"Slurm says that it is {job.get('JobState', '').lower()}, as after scancel and scontrol requeue"
    return None if anyway else "it was not preempted, and was submitted without --until-done"


def _is_grace_over(job: Mapping[str, str], preempted: str) -> bool:
    """Return whether a job has had the grace of its partition; True where Slurm does not say."""
    grace = scheduler.grace(job.get("Partition"))
    with suppress(ValueError):
        preempted_at = datetime.fromisoformat(preempted)
        return grace is None or (datetime.now() - preempted_at).total_seconds() >= grace.preempted - grace.seconds
    return True


def _requeued(job: str, run: Path, code: int) -> str:
    failures = failures_in_a_row(run, run / SUBMITTED / _STATE)
    if failures > MOST_FAILURES:
        raise RequestError(f"{MOST_FAILURES} times in a row there was no new checkpoint of {run}")
    again = f", {failures} of at most {MOST_FAILURES} times without a new checkpoint" if failures else ""
    _answered(lambda: scheduler.requeue(job))
    return f"job {job} is requeued, as the run ended with exit code {code}{again}"


def _answered(ask: Callable[[], T]) -> T:
    """Return the scheduler's answer, as soon as there is one: it may restart just when the job ends."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except scheduler.SchedulerUnreachable as error:
            if time.monotonic() >= end:
                raise
            say(f"{error}; asked again in {_AGAIN_SECONDS:.0f} s", file=sys.stderr)
            time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    main()
