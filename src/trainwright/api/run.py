"""Run directories as Python objects."""

from __future__ import annotations

import time
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.engine.checkpoints.manifest import list_checkpoints
from trainwright.engine.event_reader import EventRecord, read_events, read_status
from trainwright.errors import RequestError
from trainwright.machine.sharing import is_locked
from trainwright.recipe.registries import STOP_HOOKS
from trainwright.run.run_directory import RECIPE, SUBMITTED, read_plan
from trainwright.run.shutdown.requests import CHECKPOINT_FILE, STOP_FILE, ask
from trainwright.utils.paths import run_path

if TYPE_CHECKING:
    from trainwright.api.recipe import Recipe


class Run:
    """A training run: its recipe, its plan, what happened in it, its checkpoints and its model.

    Everything is read from the directory when it is asked for, so it may be of a run that is still training. Where a
    path is expected, a run can be given.

    Args:
        directory: the run's, as `train` returns it or ``logging.run_directory`` names it.

    Raises:
        RequestError: the directory is not a run's.

    Examples:
        >>> import trainwright as tw
        >>> run = tw.Run("runs/tiny")
        >>> run.status, run.recipe.train.max_steps, list(run.checkpoints)
        ('finished', 4, [4])
        >>> steps = run.columns("step")
        >>> steps["step"], steps["loss"][0] > 5
        ([1, 2, 3, 4], True)
        >>> run.model.name
        'final'
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = run_path(directory)
        if not (self.directory / "recipe.yaml").is_file():
            raise RequestError(f"{self.directory} is not a run directory: it has no recipe.yaml")

    @property
    def recipe(self) -> Recipe:
        """Return the recipe with every ``auto`` resolved, which reproduces the run."""
        from trainwright.api.recipe import Recipe

        return Recipe.load(self.directory / "recipe.yaml")

    @property
    def plan(self) -> dict[str, Any]:
        """Return the initial plan of the run, as ``trainwright plan --json`` prints it; empty without a plan."""
        return read_plan(self.directory)

    @property
    def status(self) -> str:
        """Return ``finished``, ``stopped``, or ``unfinished`` for a run that is training, was killed or has failed."""
        return read_status(self.directory)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation during training; empty if there was none."""
        evaluations = self.events("evaluate")
        return dict(evaluations[-1]["metrics"]) if evaluations else {}

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Return the directories of the checkpoints by step, the oldest first."""
        return list_checkpoints(self.directory / "checkpoints")

    @property
    def model(self) -> Path | None:
        """Return the directory of the trained model, or of its adapter; None until the run has finished."""
        final = self.directory / "final"
        return final if final.is_dir() else None

    def events(self, kind: str | None = None) -> list[EventRecord]:
        """Return the rows of ``events.jsonl``, each a dict, without those that a resumed run repeated.

        Args:
            kind: only this kind: ``start``, ``step``, ``evaluate``, ``generate``, ``checkpoint``, ``fault``,
                ``finish``.
        """
        try:
            events = read_events(self.directory / "events.jsonl")
        except FileNotFoundError:
            return []
        return [event for event in events if kind in (None, event["event"])]

    def columns(self, kind: str = "step") -> dict[str, list[Any]]:
        """Return the events of one kind as columns by field, and by metric; None where a row lacks the field."""
        rows = [_flatten_event(event) for event in self.events(kind)]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def to_pandas(self, kind: str = "step") -> Any:
        """Return the events of one kind as a ``pandas.DataFrame``; requires pandas."""
        try:
            import pandas
        except ImportError:
            raise RequestError("to_pandas: pandas is not installed; pip install pandas, or use columns()") from None
        return pandas.DataFrame(self.columns(kind))

    def __fspath__(self) -> str:
        return str(self.directory)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.directory.resolve() == other.directory.resolve()

    def __hash__(self) -> int:
        return hash(self.directory.resolve())

    def __str__(self) -> str:
        return str(self.directory)

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"


def _flatten_event(event: EventRecord) -> dict[str, Any]:
    metrics = event.get("metrics")
    plain = {key: value for key, value in event.items() if key not in ("event", "metrics")}
    return {**plain, **metrics} if isinstance(metrics, dict) else plain


_LOOK_SECONDS = 0.2


def checkpoint(run: Run | str | PathLike[str], timeout: float = 600.0) -> int | None:
    """Ask a run to write a checkpoint after its current step and to go on; what ``trainwright checkpoint`` does.

    Args:
        run: a run that is training, or its directory.
        timeout: how many seconds to wait until the checkpoint is complete.

    Returns:
        The step of the checkpoint; None after the timeout, or if the run has ended.

    Raises:
        RequestError: no process of this machine trains the run, or the request cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> tw.checkpoint("runs/tiny")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: runs/tiny is not being trained here; for another machine, create ...
    """
    target = Run(run)
    if not is_locked(target.directory):
        file = target.directory / CHECKPOINT_FILE
        raise RequestError(f"{target.directory} is not being trained here; for another machine, create {file}")
    before = max(target.checkpoints, default=0)
    ask(target.directory / CHECKPOINT_FILE)
    end = time.monotonic() + timeout
    while time.monotonic() < end and is_locked(target.directory):
        if (newest := max(target.checkpoints, default=0)) > before:
            return newest
        time.sleep(_LOOK_SECONDS)
    return None


def stop(run: Run | str | PathLike[str], timeout: float = 600.0) -> str:
    """Ask a run to stop after its current step, with a checkpoint; what ``trainwright stop`` does.

    Args:
        run: a run that is training, or its directory.
        timeout: how many seconds to wait until it has ended.

    A job of Slurm that trains the run ends too, and is not requeued; one that still waits is canceled. With the
    directory of an array's runs, this is so for each element that is in the queue.

    Returns:
        ``stopped``, ``finished`` (it ended first), ``unfinished`` (it failed), ``canceled`` (its job was waiting), or
        ``stopping`` after the timeout. Of an array, how many runs are what: ``4 stopped, 6 canceled``.

    Raises:
        RequestError: no process trains the run, or the request cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> tw.stop("runs/tiny")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: runs/tiny is not being trained here; for another machine, create runs/tiny/stop
    """
    directory = run.directory if isinstance(run, Run) else run_path(run)
    end = time.monotonic() + timeout
    for stop_jobs in STOP_HOOKS.present():
        if (outcome := stop_jobs(directory, timeout)) is not None:
            return outcome
    if (directory / SUBMITTED).is_dir() and not (directory / RECIPE).is_file():
        raise RequestError(f"{directory}: no job in the queue trains this run, or a run in this directory")
    target = Run(directory)
    if not is_locked(directory):
        raise RequestError(
            f"{directory} is not being trained here; for another machine, create {directory / STOP_FILE}"
        )
    ask(directory / STOP_FILE)
    while is_locked(directory):
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_LOOK_SECONDS)
    return target.status
