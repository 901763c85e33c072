"""The file of a Slurm job, one task on each node, which trains there as one node of the run; put into the queue."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.clusters.job import ELEMENT, Job, capture_variables
from trainwright.clusters.slurm import scheduler
from trainwright.clusters.slurm.scheduler import COMMENT
from trainwright.errors import RequestError
from trainwright.machine.sharing import lock_directory, remove_locked
from trainwright.recipe.sections.parallel import parse_job_seconds
from trainwright.run.run_directory import ARRAY_ELEMENT, SUBMITTED, format_directory_override
from trainwright.run.shutdown.requests import (
    STATE_BYTES,
    estimate_stop_seconds,
    estimate_write_seconds,
    forget_stops,
    stop_was_requested,
)
from trainwright.utils.paths import write_file
from trainwright.utils.text import quote_word

if TYPE_CHECKING:
    from trainwright.planning.plan import RunPlan


_REQUEUE = "trainwright.clusters.slurm.job_step"
_NO_ARRAY = f"unset SLURM_ARRAY_JOB_ID {ARRAY_ELEMENT}  # of a job that has submitted this one"
# Of the time before the limit; a run stops by itself as early as its steps and checkpoints need.
_WARNING_SECONDS, _SHORTEST_WITH_WARNING = 120, 1200
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f\"\\]")


def locate_job_directory(job: Job) -> Path:
    """Return where the job's file and its logs are."""
    return job.run / SUBMITTED


def locate_job_file(job: Job) -> Path:
    """Return the path of the job's file."""
    return locate_job_directory(job) / "job.sbatch"


def is_series(job: Job) -> bool:
    """Return whether several jobs with this file train the run, one after another."""
    return (job.settings.jobs or 1) > 1


def format_job(job: Job, variables: Mapping[str, str] | None = None) -> str:
    """Return the job's file.

    Args:
        variables: of the environment; None: of this process.

    Raises:
        RequestError: a path cannot be written into the file.
    """
    _check(job)
    exported_variables = capture_variables(os.environ if variables is None else variables)
    lines = [
        "#!/bin/bash",
        *_format_head(job),
        *(f"#SBATCH {option}" for option in _format_options(job)),
        "",
        "# The run receives the signal and stops after a checkpoint; this shell waits for it.",
        "trap : TERM USR1",
        f"cd {shlex.quote(os.getcwd())} || exit 3",
        *([] if job.settings.array else [_NO_ARRAY]),
        *(f"export {name}={shlex.quote(value)}" for name, value in exported_variables.items()),
        *job.settings.setup,
        "",
        f"run={shlex.quote(str(job.run))}" + (f"/${ARRAY_ELEMENT}" if job.settings.array else ""),
        " ".join(_train(job)),
        "code=$?",
        "trap '' TERM USR1",
        f'exec {shlex.quote(sys.executable)} -P -m {_REQUEUE} "$run" "$code"'
        + " --until-done" * bool(job.settings.until_done)
        + " --series" * is_series(job),
    ]
    return "\n".join(lines) + "\n"


def _check(job: Job) -> None:
    for label, path in (("logging.run_directory", job.run), ("the recipe", job.recipe)):
        if _UNWRITABLE.search(str(path)):
            raise RequestError(
                f"{label}: {str(path)!r} has a quote, a backslash or a control character, which Slurm's job files "
                "cannot have in a path; choose another one"
            )


def _format_head(job: Job) -> list[str]:
    comment = "# Written by trainwright submit, which plans the run first; sbatch of this file starts or resumes it too"
    series = ["# Each further job of the run: sbatch --dependency=afterany:NUMBER of the one before."] * is_series(job)
    if locate_job_directory(job).is_dir():
        return [f"{comment}.", *series]
    return [
        *series,
        f"{comment}, after",
        f"# mkdir -p {shlex.quote(str(locate_job_directory(job)))}",
        "# as Slurm creates no directory for the log.",
    ]


def _format_options(job: Job) -> list[str]:
    settings = job.settings
    log = "%A_%a.log" if settings.array else "%j.log"
    options: dict[str, object] = {
        "job-name": job.name,
        "comment": f'"{COMMENT}{job.run}"',
        "nodes": settings.nodes or 1,
        "ntasks-per-node": 1,
        "cpus-per-task": settings.cpus_per_node,
        "gpus-per-node": settings.gpus_per_node,
        "time": None if settings.time is None else _format_time(parse_job_seconds(settings.time)),
        "partition": settings.partition,
        "account": settings.account,
        "array": settings.array,
        "output": f'"{str(locate_job_directory(job)).replace("%", "%%")}/{log}"',
        "open-mode": "append",
    }
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if settings.time is not None and parse_job_seconds(settings.time) >= _SHORTEST_WITH_WARNING:
        arguments.append(f"--signal=USR1@{_WARNING_SECONDS}")
    return [*arguments, "--requeue", *settings.options]


def _train(job: Job) -> list[str]:
    settings = job.settings
    cpus = [] if settings.cpus_per_node is None else [f"--cpus-per-task={settings.cpus_per_node}"]
    nodes = [] if (settings.nodes or 1) == 1 else ["--nodes", str(settings.nodes)]
    words = ["train", str(job.recipe), *job.overrides, format_directory_override(job.run), "--resume", "auto", *nodes]
    command = [shlex.quote(sys.executable), "-P", "-m", "trainwright", *map(_quote_word, words)]
    # --export: sbatch --export=NONE would keep from srun, too, what this file exports.
    return ["srun", "--export=ALL", "--ntasks-per-node=1", *cpus, "--kill-on-bad-exit=0", *command]


def _quote_word(word: str) -> str:
    """Quote a word for the shell, in which ``{element}`` is the index in the array."""
    return f'"${ARRAY_ELEMENT}"'.join(shlex.quote(part) if part else "" for part in word.split(ELEMENT)) or "''"


def _format_time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"


_OF_CPUS = re.compile(r"cpu|processor|configuration|limit", re.IGNORECASE)
_LOCK_SECONDS = 400.0  # longer than the scheduler's commands may take


class _InDoubt(RequestError):
    """The job may be in the queue."""


def complete_job(job: Job) -> Job:
    """Return the job with what Slurm knows of its nodes, if it can be asked."""
    settings = job.settings
    if settings.cpus_per_node is not None:
        return job
    with suppress(RequestError):
        cpus = scheduler.count_cpus_per_node(settings.partition, settings.gpus_per_node)
        return replace(job, settings=settings.model_copy(update={"cpus_per_node": cpus}))
    return job


def submit(job: Job, *, chosen: bool = False) -> list[str]:
    """Write the job's file and submit it as often as was asked; return the numbers of the jobs.

    Args:
        chosen: the number of its CPUs is that of `complete_job`.

    Raises:
        RequestError: there is no scheduler, it refuses the job, or another job of the run is in the queue, and nothing
            is left behind; or the scheduler did not answer, and the job may be in the queue.
    """
    _refuse_queued(job)
    try:
        locate_job_directory(job).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{locate_job_directory(job)} cannot be created: {error.strerror}") from None
    # Of several that submit one run at a time, the first does; the others find its job.
    with lock_directory(locate_job_directory(job), f"{job.run} is being submitted by another process", _LOCK_SECONDS):
        file = locate_job_file(job)
        before = file.read_bytes() if file.is_file() else None
        try:
            _refuse_queued(job)
            write_file(file, format_job(job))
            for run in job.runs():
                if stop_was_requested(run):  # which the end of the new job would take for a request to it
                    forget_stops(run, 0.0)
            return _submit_jobs(job, chosen)
        except _InDoubt:  # what a job in the queue needs is left
            raise
        except OSError as error:
            _undo(job, before)
            raise RequestError(f"{file} cannot be written: {error.strerror}") from None
        except RequestError:
            _undo(job, before)
            raise


def _submit_jobs(job: Job, chosen: bool) -> list[str]:
    numbers: list[str] = []
    try:
        for _ in range(job.settings.jobs or 1):
            numbers.append(scheduler.submit(locate_job_file(job), *numbers[-1:]))
        return numbers
    except scheduler.SchedulerUnreachable as error:
        with suppress(RequestError):
            if job.settings.jobs in (None, 1):
                for job_in_queue in _list_queued_jobs(job):
                    return [job_in_queue.name.partition("_")[0]]
        raise _InDoubt(
            f"{error}; the job may be in the queue or get there: look with trainwright jobs, and if it is not there, "
            "submit the run again"
        ) from None
    except RequestError as error:
        if numbers:
            scheduler.cancel_jobs(_list_queued_jobs(job))
            raise RequestError(f"{error}; --jobs: so are canceled the {len(numbers)} that it took") from None
        if not chosen or not _OF_CPUS.search(str(error)):
            raise
        raise RequestError(
            f"{error}; --cpus-per-task={job.settings.cpus_per_node} was chosen from what Slurm says of its nodes: "
            "--cpus-per-node sets another number"
        ) from None


def _refuse_queued(job: Job) -> None:
    for entry in _list_queued_jobs(job):
        raise RequestError(
            f"job {entry.name} of {job.run} is in the queue already ({entry.state.lower()}); submit the run again when "
            f"it has ended, or end it with: trainwright stop {quote_word(job.run)}"
        )


def _list_queued_jobs(job: Job) -> list[scheduler.QueuedJob]:
    """Return the jobs in the queue that train the run, or of an array a run of it."""
    jobs = scheduler.list_queued_jobs(each=True)
    return [entry for entry in jobs if job.run in (entry.run, entry.array) and entry.state != "COMPLETING"]


def _undo(job: Job, before: bytes | None) -> None:
    with suppress(OSError):
        if before is not None:
            write_file(locate_job_file(job), before)
            return
        locate_job_file(job).unlink(missing_ok=True)
        remove_locked(locate_job_directory(job))
        job.run.rmdir()  # raises if a run is in it


def stop_warning(job: Job, plan: RunPlan) -> str | None:
    """Return a warning if Slurm kills the job before the planned run can stop after a checkpoint; otherwise None."""
    step, workload = plan.predicted().get("step_time"), plan.workload
    if step is None or (grace_period := scheduler.read_grace(job.settings.partition)) is None:
        return None
    # Of an adapter, a checkpoint is small.
    parameters = 0 if workload.model.is_partly_trained else workload.facts.total
    return grace_period.warning(
        estimate_stop_seconds(step, estimate_write_seconds(parameters * STATE_BYTES, locate_job_directory(job)))
    )
