"""All runs under a directory, followed in a thread."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.api.seeing.runs import directories
from trainwright.machine.file_lock import is_locked
from trainwright.observe.following import RunFollower
from trainwright.reports.comparing import recipe_differences
from trainwright.reports.figures import FLOPS, RunFigures

AXES = ("step", "tokens", "seconds", "flops")
_LOOK_SECONDS = 1.0
_LOG_BYTES = 2**16  # the end of a log that is shown
_NEWEST = 200  # events and samples of a run that are shown


class Board:
    """Follows the runs under ``root``; everything is asked for by a run's path in it.

    Raises:
        KeyError: from methods with the path of a run, if there is none.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._followers: dict[str, RunFollower] = {}
        self._recipes: dict[str, RunFigures] = {}  # a recipe is parsed once
        self._rows: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()  # held while a part of a file is read
        self._ends = threading.Event()

    def start(self) -> None:
        """Follow in a thread until ``close``."""
        threading.Thread(target=self._follow, name="watch", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()

    def look(self) -> None:
        """Read once what is new in every run."""
        found = {str(each.relative_to(self.root)): each for each in directories(self.root)}
        with self._lock:
            for gone in self._followers.keys() - found.keys():
                del self._followers[gone], self._recipes[gone]
                self._rows.pop(gone, None)
            for name in found.keys() - self._followers.keys():
                self._followers[name] = RunFollower(found[name])
                self._recipes[name] = RunFigures(found[name], [], [])
        for name in found:
            self._look_at(name, self._followers[name])
            if self._ends.is_set():
                return

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the row of each run by its path, as far as they have been read."""
        with self._lock:
            return dict(self._rows)

    def directory(self, name: str) -> Path:
        """Return a run's directory."""
        return self._followers[name].directory

    def curves(self, names: Sequence[str], curve: str, axis: str, most: int) -> dict[str, list[list[float | None]]]:
        """Return a curve of several runs as columns: place, mean, lowest and highest value.

        ``curve``: a field of steps, or ``validation/METRIC``.
        """
        with self._lock:
            return {name: self._curve(self._followers[name], curve, axis, most) for name in names}

    def differences(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the keys of the recipes whose values differ, with the value of every run."""
        return recipe_differences([self._recipes[name] for name in names])

    def details(self, name: str) -> dict[str, Any]:
        """Return what one run is shown with: samples, events, validation metrics and names of logs."""
        with self._lock:
            follower = self._followers[name]
            figures = self._figures(name)
            samples = [event for event in follower.events if event["event"] == "generate"]
            metrics = sorted({str(key) for event in figures.evaluations for key in event.get("metrics") or {}})
            return {
                "row": self._rows.get(name),
                "samples": samples[-_NEWEST:],
                "events": figures.timeline[-_NEWEST:],
                "metrics": metrics,
                "logs": _logs(follower.directory),
            }

    def log(self, name: str, file: str) -> str:
        """Return the end of a log."""
        directory = self.directory(name)
        if file not in _logs(directory):
            raise KeyError(file)
        with (directory / "logs" / file).open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _LOG_BYTES))
            return log.read().decode(errors="replace")

    def _follow(self) -> None:
        while not self._ends.is_set():
            self.look()
            self._ends.wait(_LOOK_SECONDS)

    def _look_at(self, name: str, follower: RunFollower) -> None:
        damage = ""
        parts = follower.looks()
        try:
            while not self._ends.is_set():
                with self._lock:
                    if next(parts, None) is None:
                        break
                    self._rows[name] = self._row(name, follower, damage)
        except FileNotFoundError:  # it has not begun, or was deleted
            pass
        except OSError as error:
            damage = f"events.jsonl: {error.strerror}"
        with self._lock:
            self._rows[name] = self._row(name, follower, damage)

    def _row(self, name: str, follower: RunFollower, damage: str) -> dict[str, Any]:
        figures, known = self._figures(name), self._recipes[name]
        notes = [damage] if damage else []
        if follower.damaged:
            notes.append(f"events.jsonl: {follower.damaged} damaged lines are left out")
        if not known.recipe:
            notes.append("recipe.yaml cannot be read")
        last = follower.last_step or {}
        return {
            "id": name,
            "name": name if name != "." else follower.directory.resolve().name,
            "task": known.task if known.recipe else "",
            "model": known.model if known.recipe else "",
            "status": figures.status,
            "step": follower.step,
            "steps": (follower.start or {}).get("max_steps"),
            "best": None if figures.best is None else figures.best[1],
            "speed": last.get("tokens_per_second"),
            "goodput": follower.goodput,
            "changed": follower.changed,
            "version": follower.version,
            "note": "; ".join(notes),
        }

    def _figures(self, name: str) -> RunFigures:
        """Return a run's figures; without its steps, which its curves have."""
        follower = self._followers[name]
        newest = [follower.newest] if follower.newest is not None and follower.newest["event"] == "step" else []
        try:
            trains = is_locked(follower.directory)
        except OSError:  # deleted meanwhile
            trains = False
        return RunFigures(follower.directory, follower.events, [*follower.events, *newest], (), trains)

    def _curve(self, follower: RunFollower, curve: str, axis: str, most: int) -> list[list[float | None]]:
        by = "tokens" if axis == "flops" else axis
        kind, _, metric = curve.partition("/")
        points = follower.curves.points
        found = _evaluations(follower, metric, by) if kind == "validation" else points(curve, by, most)
        if axis == "flops":
            per_token = FLOPS * float((follower.start or {}).get("parameters", 0))
            found[0] = [None if place is None else place * per_token for place in found[0]]
        return found


def _evaluations(follower: RunFollower, metric: str, by: str) -> list[list[float | None]]:
    at, places = follower.curves.positions["step"], follower.curves.positions[by]
    points: list[tuple[float | None, float]] = []
    for event in follower.events:
        value = (event.get("metrics") or {}).get(metric) if event["event"] == "evaluate" else None
        if isinstance(value, int | float) and value - value == 0:
            index = bisect_left(at, event["step"])
            place = 0.0 if event["step"] == 0 or not at else places[min(index, len(at) - 1)]
            points.append((place, float(value)))
    values: list[float | None] = [value for _, value in points]
    return [[place for place, _ in points], values, values, values]


def _logs(directory: Path) -> list[str]:
    return sorted(file.name for file in (directory / "logs").glob("*.log"))
