"""Runs under a directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.run.run_directory import RUNS
from trainwright.utils import text
from trainwright.utils.paths import run_path

_LONGEST_NOTE = 300
_COLUMNS = ("RUN", "STATUS", "STEP", "BEST", "BEGUN", "TOKENS", "TASK", "MODEL", "GOODPUT")
# By key of `runs`, what to sort by, and whether the largest comes first. Runs without a value come last.
_ORDERS = {
    "begun": True,
    "run": False,
    "status": False,
    "step": True,
    "best": False,
    "tokens_per_second": True,
    "goodput": True,
    "task": False,
    "model": False,
}
_DEPTH = 3  # of a run below the directory: those of a sweep or of an array are deeper


@dataclass(frozen=True)
class RunSummary:
    """A run in one line.

    Attributes:
        status: ``training``, ``finished``, ``stopped``, ``failed`` (its last event is a fault), ``ended`` (it was
            killed, or failed without an event) or ``unknown`` (its files could not be read).
        best: the lowest validation loss; None without an evaluation.
        tokens_per_second: median of the newest launch.
        goodput: seconds of the steps that count, of all seconds since the run began.
        begun: in seconds since the epoch.
        job: the scheduler's number of the newest launch; None outside of a job.
        notes: what is wrong with the run's files.
    """

    run: Path
    task: str
    model: str
    status: str
    step: int
    steps: int
    best: float | None
    tokens_per_second: float | None
    goodput: float | None
    begun: float | None
    job: str | None = None
    notes: Sequence[str] = ()

    def values(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**asdict(self), "run": str(self.run)}

    def columns(self) -> list[str]:
        """Return the columns of ``trainwright runs``."""
        date = "" if self.begun is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(self.begun))
        speed = "" if self.tokens_per_second is None else f"{text.format_count(self.tokens_per_second)}/s"
        return [
            *(str(self.run), self.status, f"{self.step}/{self.steps}" if self.steps else ""),
            "" if self.best is None else text.format_metric(self.best),
            *(date, speed, self.task, self.model, "" if self.goodput is None else f"{self.goodput:.0%}"),
        ]


def runs(
    directory: str | Path = RUNS,
    *,
    status: str | None = None,
    task: str | None = None,
    name: str | None = None,
    sort: str = "begun",
) -> list[RunSummary]:
    """Return the runs under a directory, the newest first; what ``trainwright runs`` shows.

    Args:
        directory: where to look; ``runs`` is where runs are written by default, and need not exist.
        status, task: only runs with this status or task.
        name: only runs whose path contains this text.
        sort: the attribute to sort by: the newest, longest, fastest or best first, or by name.

    Raises:
        RequestError: there is no such directory, or no such attribute to sort by.

    Examples:
        >>> import trainwright as tw
        >>> [(each.run.name, each.task, each.status, each.step) for each in tw.runs("runs", name="tiny")]
        [('tiny', 'sft', 'finished', 4)]
    """
    if sort not in _ORDERS:
        raise RequestError(f"sort: {sort}: choose from {', '.join(_ORDERS)}")
    root = run_path(directory)
    if not root.is_dir():
        if root == RUNS:
            return []
        raise RequestError(f"{root}: no such directory")
    summaries = [_summarize_run(each) for each in list_run_directories(root)]
    matching = [
        each
        for each in summaries
        if status in (None, each.status) and task in (None, each.task) and (name is None or name in str(each.run))
    ]
    matching.sort(key=lambda each: (-(each.begun or 0.0), str(each.run)))
    with_value = [each for each in matching if getattr(each, sort) is not None]
    with_value.sort(key=lambda each: getattr(each, sort), reverse=_ORDERS[sort])  # stable
    return [*with_value, *(each for each in matching if getattr(each, sort) is None)]


def list_run_directories(root: Path) -> list[Path]:
    """Return the run directories under ``root``, or ``root`` itself; each once, also where links lead to it."""
    from trainwright.observe.reports.figures import is_run

    run_directories: list[Path] = []
    level, visited = [root], set[tuple[int, int]]()
    for _ in range(_DEPTH + 1):
        level = [directory for directory in sorted(level, key=Path.is_symlink) if _is_first(directory, visited)]
        run_directories += (runs_here := list(filter(is_run, level)))
        level = [
            child for directory in level if directory not in runs_here for child in _list_subdirectories(directory)
        ]
    return sorted(run_directories)


def _is_first(directory: Path, visited: set[tuple[int, int]]) -> bool:
    """Return whether a directory is not among those ``visited``, and add it."""
    try:
        status = directory.stat()
    except OSError:  # deleted meanwhile
        return False
    identity = status.st_dev, status.st_ino
    is_first = identity not in visited
    visited.add(identity)
    return is_first


def format_runs(summaries: Sequence[RunSummary], width: int | None = None) -> Iterator[str]:
    """Yield the lines of ``trainwright runs``: one for each run, without the last columns that do not fit."""
    rows = [list(_COLUMNS), *(summary.columns() for summary in summaries)]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    count = len(sizes)
    while width is not None and count > 2 and sum(sizes[:count]) + 2 * (count - 1) > width:
        count -= 1
    room = None if width is None else max(8, width - sum(sizes[1:count]) - 2 * (count - 1))
    yield from text.format_table([[_shorten_path(row[0], room), *row[1:count]] for row in rows])
    for summary in summaries:
        yield from (f"note: {summary.run}: {note}".replace("\n", " ") for note in summary.notes)


def _shorten_path(run: str, room: int | None) -> str:
    """Return a path without its beginning where there is no room: the end tells runs apart."""
    return run if room is None or len(run) <= room else f"…{run[1 - room :]}"


def _list_subdirectories(directory: Path) -> list[Path]:
    try:
        return [child for child in directory.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:  # deleted meanwhile, or not readable
        return []


def describe_unreadable(error: Exception) -> str:
    """Return the note of a run that could not be read."""
    return f"cannot be read: {type(error).__name__}: {error}"[:_LONGEST_NOTE]


def _summarize_run(directory: Path) -> RunSummary:
    try:
        return _summarize_files(directory)
    except Exception as error:  # whatever is wrong with one run, the others are listed
        return RunSummary(
            directory, "", "", "unknown", 0, 0, None, None, None, None, None, [describe_unreadable(error)]
        )


def _summarize_files(directory: Path) -> RunSummary:
    from trainwright.observe.following import RunFollower, read_run
    from trainwright.observe.reports.figures import RunFigures

    damage = []
    try:
        read = read_run(directory)
    except OSError as error:
        read = RunFollower(directory)
        if not isinstance(error, FileNotFoundError):  # it has no events yet
            damage.append(f"events.jsonl: {error.strerror}")
    run = RunFigures.followed(read)
    return RunSummary(
        directory,
        run.task,
        run.model,
        run.status,
        read.step or 0,
        int(run.start.get("max_steps", 0)),
        None if run.best is None else run.best[1],
        read.tokens_per_second,
        read.goodput,
        read.began,
        run.start.get("job"),
        [*damage, *run.notes],
    )
