"""The figures of one run, read from its directory while it trains or afterwards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from trainwright import __version__
from trainwright.engine.checkpoints.manifest import is_checkpoint
from trainwright.engine.event_reader import EventRecord, has_lost_steps, read_log, read_recipe
from trainwright.errors import RequestError
from trainwright.machine.sharing import is_locked
from trainwright.observe.following import RunFollower
from trainwright.run.run_directory import RECIPE
from trainwright.utils import text
from trainwright.utils.paths import run_path

# Curves over steps: the field of a `step` event, its title, and its unit.
CURVES = {
    "loss": ("Training loss", ""),
    "learning_rate": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "tokens_per_second": ("Speed", "tokens/s"),
    "memory_bytes": ("Peak memory", "GiB"),
}
SMOOTHING = (0.6, 0.9, 0.97)  # weights of moving averages that a page offers
_SMOOTH = ("learning_rate", "memory_bytes")  # do not vary from step to step
FLOPS = 6  # per parameter and token, forward and backward (Kaplan et al., arXiv 2001.08361, section 2.1)
_LONGEST_NAME = 100
_LARGEST = 1e150
_EVENTS = ("fault", "restart", "rewind", "notice", "checkpoint", "start", "finish")


@dataclass(frozen=True)
class RunFigures:
    """A run, as far as its files tell.

    Attributes:
        events: without those that a resumed run repeated.
        everything: all events as they were written.
        damage: descriptions of what could not be read of ``events.jsonl``.
        trains: whether a process trains the run now.
    """

    directory: Path
    events: Sequence[EventRecord]
    everything: Sequence[EventRecord]
    damage: Sequence[str] = ()
    trains: bool = False

    @classmethod
    def read(cls, directory: str | Path, *, ended: bool = False) -> RunFigures:
        """Read a run directory. Raises RequestError if it is not one.

        Args:
            ended: the training is over, although its launch still locks the directory.
        """
        path = run_path(directory)
        if not is_run(path):
            why = "it is a checkpoint" if is_checkpoint(path) else "it has no recipe.yaml"
            raise RequestError(f"{path}: {f'is not a run directory: {why}' if path.is_dir() else 'no such directory'}")
        log = read_log(path / "events.jsonl")
        return cls(path, log.history, log.everything, log.damage, not ended and _is_training(path))

    @classmethod
    def followed(cls, run: RunFollower) -> RunFigures:
        """Return the figures of a run that is followed, without its steps but the newest event."""
        newest = [run.newest] if run.newest is not None and run.newest["event"] == "step" else []
        damage, trains = [], _is_training(run.directory)
        if run.damaged:
            damage.append(f"events.jsonl: {text.format_plural(run.damaged, 'damaged line', 'damaged lines')} left out")
        if run.is_cut_off:
            damage.append("events.jsonl: a line is too long; what follows is not read")
        if run.half_written and not trains:
            damage.append("events.jsonl: its last line is incomplete")
        return cls(run.directory, run.events, [*run.everything, *newest], damage, trains)

    @property
    def newer(self) -> str:
        """Return a sentence if a newer version than this one has written the run; "" otherwise."""
        version = _format_name(self.start.get("versions", {}).get("trainwright"))
        if _parse_version(version) <= _parse_version(__version__):
            return ""
        return f"written by trainwright {version}, newer than this one ({__version__}), which may not know all of it"

    @property
    def parent(self) -> str:
        """Return from which checkpoint of another run the run started, in words; "" if it did not."""
        parent = to_mapping(self.start.get("parent"))
        if not parent:
            return ""
        state = "" if parent.get("optimizer_state") else ", without the optimizer's state"
        checksum = _format_name(parent.get("sha256"))[:12]
        return f"starts from step {parent.get('step')} of {_format_name(parent.get('run'))} (sha256 {checksum}){state}"

    @property
    def name(self) -> str:
        """Return the last part of the directory's path."""
        return self.directory.resolve().name

    @cached_property
    def start(self) -> EventRecord:
        """Return the newest ``start`` event; empty before the first."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    @cached_property
    def recipe(self) -> Mapping[str, Any]:
        """Return the recipe as plain values; empty if its file cannot be read."""
        return self._recipe[0]

    @property
    def recipe_is_read(self) -> bool:
        """Return whether the recipe has been read, which takes up to a second."""
        return "_recipe" in self.__dict__

    @property
    def recipe_problem(self) -> str:
        """Return why the recipe cannot be read; "" if it can."""
        return self._recipe[1]

    @cached_property
    def _recipe(self) -> tuple[Mapping[str, Any], str]:
        try:
            return read_recipe(self.directory), ""
        except RequestError as error:
            return {}, str(error)

    @property
    def notes(self) -> list[str]:
        """Return a sentence for each thing that is wrong with the files of the run."""
        return [note for note in (*self.damage, self.recipe_problem, self.newer) if note]

    @property
    def task(self) -> str:
        """Return the task of the recipe."""
        return _format_name(self.recipe.get("task"))

    @property
    def model(self) -> str:
        """Return the name of the model, or the type of a model that the recipe describes."""
        section = to_mapping(self.recipe.get("model"))
        return _format_name(section.get("name") or to_mapping(section.get("config")).get("model_type"))

    @cached_property
    def status(self) -> str:
        """Return ``training``, ``finished``, ``stopped``, ``failed`` (its last event is a fault) or ``ended`` (it was
        killed, or failed without an event).
        """
        if self.trains:
            return "training"
        last = next((event for event in reversed(self.events) if event["event"] in ("start", "finish")), None)
        if last is not None and last["event"] == "finish":
            return _format_name(last.get("status", "finished"))
        without_notices = [event for event in self.everything if event["event"] != "notice"]
        return "failed" if without_notices and without_notices[-1]["event"] == "fault" else "ended"

    @cached_property
    def steps(self) -> list[EventRecord]:
        """Return the steps that count."""
        return self._of("step")

    @cached_property
    def evaluations(self) -> list[EventRecord]:
        """Return the evaluations on validation data."""
        return self._of("evaluate")

    @cached_property
    def samples(self) -> dict[str, list[EventRecord]]:
        """Return the generated texts by prompt."""
        by_prompt: dict[str, list[EventRecord]] = {}
        for event in self._of("generate"):
            by_prompt.setdefault(str(event.get("prompt")), []).append(event)
        return by_prompt

    @property
    def profiles(self) -> list[EventRecord]:
        """Return the ``profile`` events."""
        return self._of("profile")

    @cached_property
    def finish(self) -> EventRecord:
        """Return the newest ``finish`` event; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == "finish"), {})

    @property
    def step(self) -> int:
        """Return the last step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def best(self) -> tuple[int, float] | None:
        """Return the step and the loss of the best evaluation of the trained model, which is not that of step 0."""
        losses = [
            (float(event["metrics"]["loss"]), int(event["step"]))
            for event in self.evaluations
            if event["step"] > 0 and is_number(event["metrics"].get("loss"))
        ]
        return (min(losses)[1], min(losses)[0]) if losses else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the median over the steps of the newest launch after the first two."""
        import statistics

        since = self.start.get("time", 0.0)
        rates = [e["tokens_per_second"] for e in self.steps if e["time"] >= since and "tokens_per_second" in e]
        return statistics.median(rates[2:] or rates) if rates else None

    @property
    def goodput(self) -> float | None:
        """Return the seconds of the steps that count, divided by all seconds since the run began, pauses included."""
        if not self.steps:
            return None
        spent = max(1e-9, self.everything[-1]["time"] - self.everything[0]["time"])
        return min(1.0, sum(event["step_time"] for event in self.steps) / spent)

    @cached_property
    def timeline(self) -> list[EventRecord]:
        """Return launches, faults, restarts, rewinds, checkpoints and ends, in the order in which they happened."""
        return [event for event in self.everything if event["event"] in _EVENTS]

    def positions(self, axis: str) -> dict[int, float]:
        """Return where each step is on an axis: ``step``, ``tokens``, ``seconds`` (of training) or ``flops``."""
        parameters, seconds = float(self.start.get("parameters", 0)), 0.0
        by_step: dict[int, float] = {}
        for event in self.steps:
            seconds += float(event["step_time"])
            values = {"step": event["step"], "tokens": event.get("tokens", 0), "seconds": seconds}
            flops = FLOPS * parameters * float(event.get("tokens", 0))
            by_step[int(event["step"])] = flops if axis == "flops" else float(values[axis])
        return by_step

    def _of(self, kind: str) -> list[EventRecord]:
        return [event for event in self.events if event["event"] == kind]


def is_run(directory: Path) -> bool:
    """Return whether a directory is a run's: whatever ``recipe.yaml`` in it is. Checkpoints have one too, also in
    copies of runs, and where the recipe of their run is gone.
    """
    return os.path.lexists(directory / RECIPE) and not is_checkpoint(directory)


def to_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value if it is a mapping; otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def _format_name(value: Any) -> str:
    """Return a name as text that fits into a table."""
    return "" if value is None else str(value)[:_LONGEST_NAME]


def _is_training(directory: Path) -> bool:
    try:
        return is_locked(directory)
    except OSError:  # deleted meanwhile, or not readable
        return False


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version)[:3])


@dataclass(frozen=True)
class PlottedCurve:
    """Values over steps.

    Attributes:
        points: [(step, value)].
        breaks: steps before which values are missing: a step was lost, or its value is not a number.
        smoothed: for each weight of ``SMOOTHING`` the value of every point; empty for what does not vary from step to
            step.
    """

    title: str
    unit: str
    points: list[tuple[int, float]] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)
    smoothed: dict[float, list[float]] = field(default_factory=dict)


def build_curves(run: RunFigures, limit: int = 1000) -> dict[str, PlottedCurve]:
    """Return the curves of a run by name: those of ``CURVES``, metrics of steps, and validation metrics as
    ``validation/METRIC``.

    Args:
        limit: points of a curve; a longer one is thinned, with the extremes of each part kept.
    """
    curves: dict[str, PlottedCurve] = {}
    lost = [(before, after) for before, after in pairwise(run.steps) if has_lost_steps(before, after)]
    for name, (title, unit) in CURVES.items():
        curves[name] = PlottedCurve(title, unit, breaks=[int(after["step"]) for _, after in lost])
        scale = 2**30 if unit == "GiB" else 1
        for event in run.steps:
            if name in event:
                _append_value(curves[name], event["step"], event[name], scale)
    for events, prefix in ((run.steps, ""), (run.evaluations, "validation/")):
        for event in events:
            for metric, value in event.get("metrics", {}).items():
                words = text.format_metric_name(metric)
                curve = curves.setdefault(
                    f"{prefix}{metric}", PlottedCurve(f"Validation {words}" if prefix else words, "")
                )
                _append_value(curve, event["step"], value)
    for before, after in lost:
        for metric in before.get("metrics", {}).keys() & after.get("metrics", {}).keys():
            curves[metric].breaks.append(int(after["step"]))
    return {name: _reduce_curve(name, curve, limit) for name, curve in curves.items() if curve.points}


def _append_value(curve: PlottedCurve, step: int, value: Any, scale: int = 1) -> None:
    """Append a value, or a break if it is not a number."""
    if is_number(value):
        curve.points.append((int(step), float(value) / scale))
    else:
        curve.breaks.append(int(step))


def _reduce_curve(name: str, curve: PlottedCurve, limit: int) -> PlottedCurve:
    indices = _find_extremes(curve.points, limit)
    smoothed_curves = {}
    if name not in _SMOOTH and not name.startswith("validation/"):
        size = _compute_part_size(len(curve.points), limit)
        parts = [curve.points[begin : begin + size] for begin in range(0, len(curve.points), size)]
        means = [sum(value for _, value in part) / len(part) for part in parts]
        for weight in SMOOTHING:
            averages = compute_moving_average(means, weight)
            smoothed_curves[weight] = [averages[index // size] for index in indices]
    points = [curve.points[index] for index in indices]
    return PlottedCurve(curve.title, curve.unit, points, sorted(curve.breaks), smoothed_curves)


def compute_moving_average(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average, without a bias towards its beginning.

    Args:
        weight: of what came before, from 0 to 1.
    """
    averages, mean, total = [], 0.0, 0.0
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + 1 - weight
        averages.append(mean / total)
    return averages


def thin_points(points: Sequence[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """Return at most about ``limit`` points: the lowest and the highest of each of equal parts."""
    return [points[index] for index in _find_extremes(points, limit)]


def _compute_part_size(count: int, limit: int) -> int:
    return 1 if count <= limit else -(-count // (limit // 2))


def _find_extremes(points: Sequence[tuple[int, float]], limit: int) -> list[int]:
    """Return the indices of the points that ``thin_points`` keeps."""
    size = _compute_part_size(len(points), limit)
    if size == 1:
        return list(range(len(points)))
    indices = set()
    for begin in range(0, len(points), size):
        part = range(begin, min(begin + size, len(points)))
        indices |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return sorted(indices | {0, len(points) - 1})


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that is finite, and so small that sums and squares are."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
