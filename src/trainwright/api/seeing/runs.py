"""Runs under a directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright import text
from trainwright.errors import RequestError
from trainwright.launch.run_directory import RUNS
from trainwright.paths import run_path

_LONGEST_NOTE = 300
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
        begun = "" if self.begun is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(self.begun))
        speed = "" if self.tokens_per_second is None else f"{text.count(self.tokens_per_second)}/s"
        return [
            *(str(self.run), self.status, f"{self.step}/{self.steps}" if self.steps else ""),
            "" if self.best is None else text.metric(self.best),
            *(speed, "" if self.goodput is None else f"{self.goodput:.0%}", begun, self.task, self.model),
        ]


def runs(
    directory: str | Path = RUNS, *, status: str | None = None, task: str | None = None, name: str | None = None
) -> list[RunSummary]:
    """Return the runs under a directory, the newest first; what ``trainwright runs`` shows.

    Args:
        directory: where to look; ``runs`` is where runs are written by default, and need not exist.
        status, task: only runs with this status or task.
        name: only runs whose path contains this text.

    Raises:
        RequestError: there is no such directory.

    Examples:
        >>> import trainwright as tw
        >>> [(each.run.name, each.task, each.status, each.step) for each in tw.runs("runs", name="tiny")]
        [('tiny', 'sft', 'finished', 4)]
    """
    root = run_path(directory)
    if not root.is_dir():
        if root == RUNS:
            return []
        raise RequestError(f"{root}: no such directory")
    found = [_summary(each) for each in directories(root)]
    wanted = [
        each
        for each in found
        if status in (None, each.status) and task in (None, each.task) and (name is None or name in str(each.run))
    ]
    return sorted(wanted, key=lambda each: (-(each.begun or 0.0), str(each.run)))


def directories(root: Path) -> list[Path]:
    """Return the run directories under ``root``, or ``root`` itself; each once, also where links lead to it."""
    from trainwright.reports.figures import is_run

    found: list[Path] = []
    level, seen = [root], set[tuple[int, int]]()
    for _ in range(_DEPTH + 1):
        level = [each for each in sorted(level, key=Path.is_symlink) if _is_first(each, seen)]
        found += (runs_here := list(filter(is_run, level)))
        level = [child for each in level if each not in runs_here for child in _subdirectories(each)]
    return sorted(found)


def _is_first(directory: Path, seen: set[tuple[int, int]]) -> bool:
    """Return whether a directory is not among those ``seen``, and add it."""
    try:
        status = directory.stat()
    except OSError:  # deleted meanwhile
        return False
    identity = status.st_dev, status.st_ino
    is_first = identity not in seen
    seen.add(identity)
    return is_first


def table(found: Sequence[RunSummary], width: int | None = None) -> Iterator[str]:
    """Yield the lines of ``trainwright runs``, see `text.table`."""
    head = ["RUN", "STATUS", "STEP", "BEST", "TOKENS", "GOODPUT", "BEGUN", "TASK", "MODEL"]
    yield from text.table([head, *(each.columns() for each in found)], width)
    for each in found:
        yield from (f"note: {each.run}: {note}".replace("\n", " ") for note in each.notes)


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return [each for each in directory.iterdir() if each.is_dir() and not each.name.startswith(".")]
    except OSError:  # deleted meanwhile, or not readable
        return []


def unreadable(error: Exception) -> str:
    """Return the note of a run that could not be read."""
    return f"cannot be read: {type(error).__name__}: {error}"[:_LONGEST_NOTE]


def _summary(directory: Path) -> RunSummary:
    try:
        return _summary_of_files(directory)
    except Exception as error:  # whatever is wrong with one run, the others are listed
        return RunSummary(directory, "", "", "unknown", 0, 0, None, None, None, None, None, [unreadable(error)])


def _summary_of_files(directory: Path) -> RunSummary:
    from trainwright.observe.following import RunFollower
    from trainwright.observe.kept import read_run
    from trainwright.reports.figures import RunFigures

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
