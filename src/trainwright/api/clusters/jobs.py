"""Runs and the jobs that train them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright import text
from trainwright.errors import RequestError
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.launch.slurm.scheduler import QueuedJob
    from trainwright.observe.reader import EventRecord

_FAR = 1e10  # seconds, three centuries
_LAST_STEPS = 50  # whose median gives the expected end


@dataclass(frozen=True)
class RunState:
    """A run and its job.

    Attributes:
        run: the run directory; of an array whose elements wait, that of their runs.
        job: the scheduler's number of the job in the queue that trains the run, otherwise of the last one that did;
            None if there was none.
        state: ``pending``, ``running`` and so on as the scheduler says, with its reason to wait; without a job
            that of ``trainwright runs``.
        step: the last step; None before the first.
        steps: the last step of the finished run.
        goodput: seconds of the steps that count, of all seconds since the run began.
        end: when the run is expected to finish, in seconds since the epoch; None unless it trains.
    """

    run: Path
    job: str | None
    state: str
    step: int | None = None
    steps: int | None = None
    goodput: float | None = None
    end: float | None = None

    def columns(self) -> list[str]:
        """Return the columns of ``trainwright jobs``."""
        at = "" if self.step is None else f"{self.step}/{self.steps}"
        goodput = "" if self.goodput is None else f"{self.goodput:.0%}"
        end = "" if self.end is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(self.end))
        return [str(self.run), self.job or "", self.state, at, goodput, end]


def jobs(*runs: str | Path) -> list[RunState]:
    """Return runs and the jobs of Slurm that train them; what ``trainwright jobs`` shows.

    Args:
        runs: directories of runs. Default: those in ``runs/`` and those of this user's jobs.

    Raises:
        RequestError: a directory is not a run's. If Slurm does not answer, runs are shown without their jobs.

    Examples:
        >>> import trainwright as tw
        >>> [(each.run.name, each.state, each.step, each.steps) for each in tw.jobs("runs/tiny")]
        [('tiny', 'finished', 4, 4)]
    """
    from trainwright.api.run import Run

    queued = {job.run: job for job in sorted(_queue(), key=_order, reverse=True)}  # of several the first in order
    wanted = [Run(run).directory for run in runs] if runs else [*_runs_here(), *queued]
    found = {directory.absolute(): directory for directory in reversed(wanted)}
    return [_state(shown, queued.get(directory)) for directory, shown in sorted(found.items())]


def table(found: Sequence[RunState], width: int | None = None) -> Iterator[str]:
    """Yield the lines of ``trainwright jobs``, see `text.table`."""
    head = ["RUN", "JOB", "STATE", "STEP", "GOODPUT", "EXPECTED END"]
    yield from text.table([head, *(each.columns() for each in found)], width)


def _order(job: QueuedJob) -> tuple[bool, int]:
    """Return the place of a job among those of its run: what runs, then what waits, as submitted."""
    return job.waits, int(job.name.partition("_")[0])


def _queue() -> list[QueuedJob]:
    """Return the jobs in Slurm's queue; none, with a note, if it does not answer."""
    from shutil import which

    from trainwright.launch.slurm.scheduler import queue

    try:
        return [] if which("squeue") is None else queue()
    except RequestError as error:
        say(f"note: runs are shown without their jobs: {error}", file=sys.stderr)
        return []


def _runs_here() -> list[Path]:
    from trainwright.launch.run_directory import RECIPE, RUNS

    return sorted(file.parent for pattern in (f"*/{RECIPE}", f"*/*/{RECIPE}") for file in RUNS.glob(pattern))


def _state(directory: Path, job: QueuedJob | None) -> RunState:
    from trainwright.reports.figures import RunFigures

    number = None if job is None else job.name
    try:
        run = RunFigures.read(directory)
    except RequestError:  # it has not begun
        assert job is not None, "the others are runs"
        return RunState(directory, number, _words(job))
    state = run.status if job is None else _words(job)
    if not run.start:
        return RunState(directory, number, state)
    number = number or run.start.get("job")
    last = run.start.get("max_steps", 0)
    runs_now = run.trains or (job is not None and job.state == "RUNNING")
    end = _expected_end(last, run.steps) if runs_now and run.steps else None
    return RunState(directory, number, state, run.step if run.steps else None, last, run.goodput, end)


def _words(job: QueuedJob) -> str:
    words = job.state.lower()
    return f"{words} ({job.reason})" if job.state == "PENDING" else words


def _expected_end(last: int, steps: Sequence[EventRecord]) -> float | None:
    left = max(0, last - int(steps[-1]["step"]))
    seconds = left * statistics.median(event["step_time"] for event in steps[-_LAST_STEPS:])
    return float(steps[-1]["time"] + seconds) if seconds < _FAR else None
