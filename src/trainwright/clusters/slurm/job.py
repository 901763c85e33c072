"""The file of a Slurm job: one task on each node, which trains there as one node of the run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from trainwright.clusters.job import ELEMENT, Job, captured
from trainwright.errors import RequestError
from trainwright.recipe.sections.launch import job_seconds
from trainwright.run.run_directory import ARRAY_ELEMENT, SUBMITTED, override_of

COMMENT = "trainwright:"  # and the run directory, as squeue shows it
_SCRIPT = "job.sbatch"
_REQUEUE = "trainwright.clusters.slurm.job_step"
_NO_ARRAY = f"unset SLURM_ARRAY_JOB_ID {ARRAY_ELEMENT}  # of a job that has submitted this one"
# Of the time before the limit; a run stops by itself as early as its steps and checkpoints need.
_WARNING_SECONDS, _SHORTEST_WITH_WARNING = 120, 1200
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f\"\\]")


def directory_of(job: Job) -> Path:
    """Return where the job's file and its logs are."""
    return job.run / SUBMITTED


def file_of(job: Job) -> Path:
    """Return the path of the job's file."""
    return directory_of(job) / _SCRIPT


def is_series(job: Job) -> bool:
    """Return whether several jobs with this file train the run, one after another."""
    return (job.settings.jobs or 1) > 1


def text(job: Job, variables: Mapping[str, str] | None = None) -> str:
    """Return the job's file.

    Args:
        variables: of the environment; None: of this process.

    Raises:
        RequestError: a path cannot be written into the file.
    """
    _check(job)
    exported = captured(os.environ if variables is None else variables)
    lines = [
        "#!/bin/bash",
        *_head(job),
        *(f"#SBATCH {option}" for option in _options(job)),
        "",
        "# The run receives the signal and stops after a checkpoint; this shell waits for it.",
        "trap : TERM USR1",
        f"cd {shlex.quote(os.getcwd())} || exit 3",
        *([] if job.settings.array else [_NO_ARRAY]),
        *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
        *job.settings.setup,
        "",
        f"run={shlex.quote(str(job.run))}" + (f"/${ARRAY_ELEMENT}" if job.settings.array else ""),
        " ".join(_train(job)),
        "code=$?",
        "trap '' TERM USR1",
        f'exec {shlex.quote(sys.executable)} -m {_REQUEUE} "$run" "$code"'
        + " --until-done" * bool(job.settings.until_done)
        + " --series" * is_series(job),
    ]
    return "\n".join(lines) + "\n"


def _check(job: Job) -> None:
    for what, path in (("logging.run_directory", job.run), ("the recipe", job.recipe)):
        if _UNWRITABLE.search(str(path)):
            raise RequestError(
                f"{what}: {str(path)!r} has a quote, a backslash or a control character, which Slurm's job files "
                "cannot have in a path; choose another one"
            )


def _head(job: Job) -> list[str]:
    written = "# Written by trainwright submit, which plans the run first; sbatch of this file starts or resumes it too"
    series = ["# Each further job of the run: sbatch --dependency=afterany:NUMBER of the one before."] * is_series(job)
    if directory_of(job).is_dir():
        return [f"{written}.", *series]
    return [
        *series,
        f"{written}, after",
        f"# mkdir -p {shlex.quote(str(directory_of(job)))}",
        "# as Slurm creates no directory for the log.",
    ]


def _options(job: Job) -> list[str]:
    settings = job.settings
    log = "%A_%a.log" if settings.array else "%j.log"
    options: dict[str, object] = {
        "job-name": job.name,
        "comment": f'"{COMMENT}{job.run}"',
        "nodes": settings.nodes or 1,
        "ntasks-per-node": 1,
        "cpus-per-task": settings.cpus_per_node,
        "gpus-per-node": settings.gpus_per_node,
        "time": None if settings.time is None else _slurm_time(job_seconds(settings.time)),
        "partition": settings.partition,
        "account": settings.account,
        "array": settings.array,
        "output": f'"{str(directory_of(job)).replace("%", "%%")}/{log}"',
        "open-mode": "append",
    }
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if settings.time is not None and job_seconds(settings.time) >= _SHORTEST_WITH_WARNING:
        arguments.append(f"--signal=USR1@{_WARNING_SECONDS}")
    return [*arguments, "--requeue", *settings.options]


def _train(job: Job) -> list[str]:
    settings = job.settings
    cpus = [] if settings.cpus_per_node is None else [f"--cpus-per-task={settings.cpus_per_node}"]
    nodes = [] if (settings.nodes or 1) == 1 else ["--nodes", str(settings.nodes)]
    words = ["train", str(job.recipe), *job.overrides, override_of(job.run), "--resume", "auto", *nodes]
    command = [shlex.quote(sys.executable), "-m", "trainwright", *map(_quoted, words)]
    # --export: sbatch --export=NONE would keep from srun, too, what this file exports.
    return ["srun", "--export=ALL", "--ntasks-per-node=1", *cpus, "--kill-on-bad-exit=0", *command]


def _quoted(word: str) -> str:
    """Quote a word for the shell, in which ``{element}`` is the index in the array."""
    return f'"${ARRAY_ELEMENT}"'.join(shlex.quote(part) if part else "" for part in word.split(ELEMENT)) or "''"


def _slurm_time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"
