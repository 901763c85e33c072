"""Run directories as Python objects."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.utils.paths import run_path

if TYPE_CHECKING:
    from trainwright.api.recipe import Recipe
    from trainwright.engine.event_reader import EventRecord


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
        from trainwright.run.run_directory import plan_of

        return plan_of(self.directory)

    @property
    def status(self) -> str:
        """Return ``finished``, ``stopped``, or ``unfinished`` for a run that is training, was killed or has failed."""
        from trainwright.engine.event_reader import status_of

        return status_of(self.directory)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last evaluation during training; empty if there was none."""
        measured = self.events("evaluate")
        return dict(measured[-1]["metrics"]) if measured else {}

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Return the directories of the checkpoints by step, the oldest first."""
        from trainwright.engine.checkpoints.manifest import checkpoints_in

        return checkpoints_in(self.directory / "checkpoints")

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
        from trainwright.engine.event_reader import read_events

        try:
            events = read_events(self.directory / "events.jsonl")
        except FileNotFoundError:
            return []
        return [event for event in events if kind in (None, event["event"])]

    def columns(self, kind: str = "step") -> dict[str, list[Any]]:
        """Return the events of one kind as columns by field, including one per metric; None where a row lacks the
        field.
        """
        rows = [_flat(event) for event in self.events(kind)]
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


def _flat(event: EventRecord) -> dict[str, Any]:
    metrics = event.get("metrics")
    plain = {key: value for key, value in event.items() if key not in ("event", "metrics")}
    return {**plain, **metrics} if isinstance(metrics, dict) else plain
