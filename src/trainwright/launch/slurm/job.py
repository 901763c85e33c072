"""The file of a Slurm job: one task on each node, which trains there as one node of the run."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.launch.run_directory import ARRAY_ELEMENT, SUBMITTED
from trainwright.launch.slurm.settings import Cluster
from trainwright.recipe.sections.launch import job_seconds

COMMENT = "trainwright:"  # and the run directory, as squeue shows it
ELEMENT = "{element}"
_SCRIPT = "job.sbatch"
_REQUEUE = "trainwright.launch.slurm.requeue"
# Of the time before the limit; a run stops by itself as early as its steps and checkpoints need.
_WARNING_SECONDS, _SHORTEST_WITH_WARNING = 120, 1200
# Variables whose values decide how a run computes and where it finds its files. Secrets are not written.
_CAPTURED = re.compile(
    r"(TRAINWRIGHT|HF|TRANSFORMERS|TORCH|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|OMP|MKL|TRITON|UCX|FI|DS)_\w+|"
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TMPDIR"
)
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)(_|$)")
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f\"\\]")
_NAME = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class Job:
    """A job that trains one run; with an array, one run for each element.

    Attributes:
        run: the directory of the run, or of the runs of an array; absolute.
        recipe: absolute.
    """

    run: Path
    recipe: Path
    overrides: tuple[str, ...]
    settings: Cluster

    @property
    def name(self) -> str:
        """The job's name, as the scheduler shows it."""
        return re.sub(r"[^\w.+-]", "-", self.run.name, flags=re.ASCII)

    @property
    def directory(self) -> Path:
        """Where the job's file and its logs are."""
        return self.run / SUBMITTED

    @property
    def file(self) -> Path:
        """The job's file."""
        return self.directory / _SCRIPT

    def check(self) -> None:
        """Raise RequestError for a path that cannot be written into the job's file."""
        for what, path in (("logging.run_directory", self.run), ("the recipe", self.recipe)):
            if _UNWRITABLE.search(str(path)):
                raise RequestError(
                    f"{what}: {str(path)!r} has a quote, a backslash or a control character, which Slurm's job files "
                    "cannot have in a path; choose another one"
                )

    def text(self, variables: Mapping[str, str] | None = None) -> str:
        """Return the job's file. ``variables``: of the environment; None: of this process."""
        exported = captured(os.environ if variables is None else variables)
        lines = [
            "#!/bin/bash",
            "# Written by trainwright submit, which plans the run first; sbatch of this file starts or resumes it too.",
            *(f"#SBATCH {option}" for option in self._options()),
            "",
            "# The run receives the signal and stops after a checkpoint; this shell waits for it.",
            "trap : TERM USR1",
            f"cd {shlex.quote(os.getcwd())} || exit 3",
            *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
            *self.settings.setup,
            "",
            f"run={shlex.quote(str(self.run))}" + (f"/${ARRAY_ELEMENT}" if self.settings.array else ""),
            " ".join(self._train()),
            "code=$?",
            "trap '' TERM USR1",
            f'exec {shlex.quote(sys.executable)} -m {_REQUEUE} "$run" "$code"'
            + " --until-done" * bool(self.settings.until_done),
        ]
        return "\n".join(lines) + "\n"

    def _options(self) -> list[str]:
        asked = self.settings
        log = "%A_%a.log" if asked.array else "%j.log"
        options: dict[str, object] = {
            "job-name": self.name,
            "comment": f'"{COMMENT}{self.run}"',
            "nodes": asked.nodes or 1,
            "ntasks-per-node": 1,
            "cpus-per-task": asked.cpus_per_node,
            "gpus-per-node": asked.gpus_per_node,
            "time": None if asked.time is None else _slurm_time(job_seconds(asked.time)),
            "partition": asked.partition,
            "account": asked.account,
            "array": asked.array,
            "output": f'"{str(self.directory).replace("%", "%%")}/{log}"',
            "open-mode": "append",
        }
        found = [f"--{name}={value}" for name, value in options.items() if value is not None]
        if asked.time is not None and job_seconds(asked.time) >= _SHORTEST_WITH_WARNING:
            found.append(f"--signal=USR1@{_WARNING_SECONDS}")
        return [*found, "--requeue", *asked.options]

    def _train(self) -> list[str]:
        asked = self.settings
        cpus = [] if asked.cpus_per_node is None else [f"--cpus-per-task={asked.cpus_per_node}"]
        nodes = [] if (asked.nodes or 1) == 1 else ["--nodes", str(asked.nodes)]
        directory = f"logging.run_directory={self.run}"
        words = ["train", str(self.recipe), *self.overrides, directory, "--resume", "auto", *nodes]
        command = [shlex.quote(sys.executable), "-m", "trainwright", *map(_quoted, words)]
        return ["srun", "--ntasks-per-node=1", *cpus, "--kill-on-bad-exit=0", *command]


def check_name(name: str) -> None:
    """Raise RequestError for a name that is not plain."""
    if not _NAME.fullmatch(name) or name.startswith(("-", ".")):
        raise RequestError(
            f"--name: {name!r} is not a plain name of a run and its job; use letters, digits, '.', '_', '+' and '-'"
        )


def with_element(overrides: Sequence[str], array: str) -> list[str]:
    """Return the overrides of the first element of an array."""
    first = re.split(r"[-,%:]", array, maxsplit=1)[0]
    return [each.replace(ELEMENT, first) for each in overrides]


def _quoted(word: str) -> str:
    """Quote a word for the shell, in which ``{element}`` is the index in the array."""
    return f'"${ARRAY_ELEMENT}"'.join(shlex.quote(part) if part else "" for part in word.split(ELEMENT)) or "''"


def _slurm_time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"


def captured(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values decide how a run computes and where it finds its files, without secrets."""
    names = sorted(name for name in variables if _CAPTURED.fullmatch(name) and not _SECRET.search(name))
    return {name: variables[name] for name in names}
