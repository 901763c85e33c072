"""What a run does as it begins in a job of Slurm: it warns of what would end it early, and ends an orphaned step.

The end of a job: put it back into the queue if the run is to go on, otherwise end with the run's exit code.

    python -m trainwright.clusters.slurm.job_step RUN CODE [--until-done] [--series]

Slurm itself requeues no job that ends within the grace of a preemption: it counts as failed, unless its code is 0.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from trainwright.api.run import Run
from trainwright.clusters.job_attempts import MOST_FAILURES, count_failures, may_continue
from trainwright.clusters.slurm import scheduler
from trainwright.engine.event_reader import read_status
from trainwright.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_STOPPED, RequestError
from trainwright.machine.usage import survives_signal
from trainwright.run.group.environment import SUPERVISING_LAUNCHERS
from trainwright.run.run_directory import RECIPE, SUBMITTED
from trainwright.run.shutdown.requests import STOP_FILE, ask, stop_was_requested
from trainwright.run.shutdown.stop import find_scheduler_job, is_shell
from trainwright.utils.text import say

_SUPERVISOR = "slurmstepd"
_SCANCEL_SECONDS = 60  # for Slurm's answer


def begin(launcher: str) -> str | None:
    """Begin a run whose processes ``launcher`` starts; return a warning or None."""
    if launcher != "trainwright":
        return check_launcher_signals(launcher)
    end_orphaned_step()
    return check_job_script()


def check_job_script() -> str | None:
    """Return a warning about a command to which Slurm leaves no time for a last checkpoint, or None."""
    if os.environ.get("SLURM_TASK_PID") != str(os.getppid()) or not is_shell(os.getppid()):
        return None
    return (
        "this command runs in a job script: on scancel, preemption and at the time limit, Slurm ends the script's "
        "shell and this run before it can write a last checkpoint; put exec or srun before the command"
    )


def check_launcher_signals(launcher: str) -> str | None:
    """Return a warning for a job whose launcher would die of SIGUSR1 or SIGUSR2; otherwise None.

    Slurm sends the signal of `--signal=USR1@N` to every process of a step. torchrun neither handles nor passes on
    these two by default (`--signals-to-handle`, torch/distributed/run.py).
    """
    if launcher not in SUPERVISING_LAUNCHERS or "SLURM_JOB_ID" not in os.environ:
        return None
    fatal = [number.name for number in (signal.SIGUSR1, signal.SIGUSR2) if not survives_signal(os.getppid(), number)]
    if not fatal:
        return None
    return (
        f"{launcher} (process {os.getppid()}) dies of {' and '.join(fatal)}: with #SBATCH --signal=USR1@SECONDS, Slurm "
        "may end this run before its last checkpoint is written; start it with trainwright under, or export "
        "PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 in the job script"
    )


def end_orphaned_step() -> None:
    """When this process ends, have Slurm end its job step if what supervises it has died by then."""
    job, step, parent = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID"), os.getppid()
    if job and step and _read_program_name(parent) == _SUPERVISOR:
        atexit.register(_end_step, f"{job}.{step}", os.getpid(), parent)


def _end_step(step: str, process: int, parent: int) -> None:
    if os.getpid() != process or os.getppid() == parent:  # a child of it, or all is well
        return
    say(f"{_SUPERVISOR} of step {step} has died on this node, so the step is ended by scancel", file=sys.stderr)
    try:
        subprocess.run(["scancel", step], capture_output=True, timeout=_SCANCEL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        say(f"scancel {step} failed: {error}", file=sys.stderr)


def _read_program_name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


T = TypeVar("T")
_STATE = "requeues.json"
_AGAIN_SECONDS, _PATIENCE_SECONDS = 5.0, 900.0  # while Slurm's controller does not answer


def main() -> None:
    """Requeue the job, or exit with the code of the run."""
    parser = argparse.ArgumentParser(prog="python -m trainwright.clusters.slurm.job_step", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("code", type=int)
    parser.add_argument("--until-done", action="store_true", help="also after a time limit")
    parser.add_argument("--series", action="store_true", help="other jobs of the run follow, if it goes on")
    options = parser.parse_args()
    job = find_scheduler_job()
    if job is None:
        parser.error("this ends a job of Slurm, and SLURM_JOB_ID is not set")
    if options.code == EXIT_FINISHED and read_status(options.run) != "finished":
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
            reason = _explain_no_requeue(_await_answer(lambda: scheduler.read_job(job)), anyway)
            if reason is None:
                say(_requeue_job(job, options.run, options.code), file=sys.stderr)
            else:
                say(f"job {job} is not requeued: {reason}", file=sys.stderr)
    except RequestError as error:
        say(f"job {job} is not requeued: {error}", file=sys.stderr)
    sys.exit(options.code)


def _cancel_later(run: Path) -> None:
    """Cancel the jobs that were to go on with the run; one that starts nevertheless ends as the run does."""
    later = [job for job in _await_answer(lambda: scheduler.list_run_jobs(run)) if job.waits]
    scheduler.cancel_jobs(later)
    if later:
        names = ", ".join(job.name for job in later)
        say(f"the run does not go on, so its later jobs are canceled: {names}", file=sys.stderr)


def _explain_no_requeue(job: Mapping[str, str], anyway: bool) -> str | None:
    """Return why not to requeue the job; None: requeue it, as it was preempted or is to go on ``anyway``."""
    if not job:
        return "Slurm does not know it"
    runs = job.get("JobState") == "RUNNING"
    # A job whose grace is over is completing, as one that a user has canceled or requeued. The time may be that of an
    # earlier start.
    preempted_at, began_at = job.get("PreemptTime", "None"), job.get("StartTime", "")
    if preempted_at != "None" and preempted_at >= began_at and (runs or _is_grace_over(job, preempted_at)):
        return None
    if not runs and job.get("Reason") != "TimeLimit":
        return f"Slurm says that it is {job.get('JobState', '').lower()}, as after scancel and scontrol requeue"
    return None if anyway else "it was not preempted, and was submitted without --until-done"


def _is_grace_over(job: Mapping[str, str], preempted: str) -> bool:
    """Return whether a job has had the grace of its partition; True where Slurm does not say."""
    grace = scheduler.read_grace(job.get("Partition"))
    with suppress(ValueError):
        preempted_at = datetime.fromisoformat(preempted)
        return grace is None or (datetime.now() - preempted_at).total_seconds() >= grace.preempted - grace.seconds
    return True


def _requeue_job(job: str, run: Path, code: int) -> str:
    failures = count_failures(run, run / SUBMITTED / _STATE)
    if failures > MOST_FAILURES:
        raise RequestError(f"{MOST_FAILURES} times in a row there was no new checkpoint of {run}")
    retries = f", {failures} of at most {MOST_FAILURES} times without a new checkpoint" if failures else ""
    _await_answer(lambda: scheduler.requeue_job(job))
    return f"job {job} is requeued, as the run ended with exit code {code}{retries}"


def _await_answer(ask: Callable[[], T]) -> T:
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


_ASK_SECONDS = 2.0


def stop_jobs(directory: Path, seconds: float) -> str | None:
    """Stop the jobs in the queue that train a run; return what has become of them, None if there are none.

    Args:
        directory: of the run, or of an array's runs.
        seconds: how long to wait.
    """
    jobs, end = scheduler.list_run_jobs(directory), time.monotonic() + seconds
    if not jobs:
        return None
    ends: dict[Path, str] = {}
    stopped_before: set[tuple[str, bool]] = set()
    while jobs:
        # A job may begin, or wait again, meanwhile.
        new = [job for job in jobs if (job.name, job.waits) not in stopped_before]
        running = [job for job in jobs if not job.waits and (job.run / RECIPE).is_file()]
        started_jobs = [job for job in new if job in running]
        scheduler.cancel_jobs([job for job in new if job not in started_jobs])
        scheduler.forbid_requeue(started_jobs)
        for job in running:  # a start that is not this far yet forgets what was asked before it
            if job in started_jobs or not stop_was_requested(job.run):
                ask(job.run / STOP_FILE)
        stopped_before |= {(job.name, job.waits) for job in new}
        ends |= {job.run: "canceled" for job in new if job not in started_jobs} | {job.run: "" for job in started_jobs}
        if all(job.waits for job in jobs):
            break
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_ASK_SECONDS)
        jobs = scheduler.list_run_jobs(directory)
    statuses = [status or Run(run).status for run, status in ends.items()]
    counts = ", ".join(f"{count} {status}" for status, count in Counter(statuses).most_common())
    return statuses[0] if [*ends] == [directory.absolute()] else counts
