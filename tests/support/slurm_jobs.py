"""Jobs of the tiny recipe on the Slurm of tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.commands import wait_for
from tests.support.runs import ON_ROWS, TINY, events
from tests.support.slurm import Slurm

SETTINGS = (ON_ROWS, "data.validation=null", "logging.observers.tensorboard=false", "checkpoint.every=1000")


def submit(slurm: Slurm, where: Path, *words: str, before: Sequence[str] = ()) -> tuple[str, Path]:
    """Submit the tiny recipe; return the job and the run. ``before``: the command that runs this one."""
    command = trainwright("submit", str(TINY), *SETTINGS, "--to", "slurm", *words)
    lines = dict(line.split(" ", 1) for line in slurm.run(*before, *command, cwd=where).splitlines()[-2:])
    return lines["job"], Path(lines["run"])


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a run has taken so many steps."""
    wait_for(lambda: (run / "events.jsonl").exists() and len(events(run, "step")) >= step, every=0.2)


def log(run: Path) -> str:
    """What the jobs of a run have written."""
    return "".join(file.read_text() for file in sorted((run / "slurm").glob("*.log")))


def trainwright(*words: str) -> tuple[str, ...]:
    """A command of ours, for ``Slurm.run``."""
    return sys.executable, "-m", "trainwright", *words
