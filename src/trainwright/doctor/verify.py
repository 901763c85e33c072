"""Verify on this machine that a distributed run of a recipe equals the run on one process: compare both step by step.

Both runs use the launcher and the engine of ``train`` for a few steps, in a temporary directory.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trainwright.engine.event_reader import EventRecord, read_events
from trainwright.errors import EXIT_STOPPED, MachineError, RequestError, Stopped, TrainingError, TrainwrightError
from trainwright.machine.machine import Machine
from trainwright.recipe.loading import dump_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.model import ModelSection
from trainwright.recipe.sections.parallel import ParallelSection
from trainwright.run import run_directory
from trainwright.run.observers.progress import Remaining, build_progress
from trainwright.run.process import find_console, preload_worker, prepare, prepare_environment, run_in_child
from trainwright.run.shutdown.stop import Stopping
from trainwright.utils import text
from trainwright.utils.text import format_bytes, format_count, say

_SHOW_SECONDS = 5.0
_BYTES = 16  # of a parameter: fp32 master weight, gradient and AdamW's two moments
_USABLE = 0.8  # of the memory; the rest is for activations and other programs


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    recipe: RecipeSchema
    run: Path

    @property
    def processes(self) -> int:
        """The number of processes."""
        return _read_process_count(self.recipe)


def verify(recipe: RecipeSchema, machine: Machine, steps: int, out: TextIO) -> Comparison:
    """Compare the first steps of a resolved recipe with those of the same recipe on one process, and print to ``out``.

    Raises:
        RequestError: the recipe already runs on one process.
        MachineError: the machine cannot run one of the two.
        TrainingError: one of the runs failed; the output of both is kept.
        Stopped: a stop was requested.
    """
    reference = build_reference(recipe)
    prepare_environment(machine.cpu_cores, _read_process_count(recipe))
    directory, is_kept = Path(tempfile.mkdtemp(prefix="trainwright-verify-")), False
    try:
        with Stopping("stopping after this step") as stopping:
            preload_worker(recipe)
            model = _prepare_model(recipe, machine, directory, stopping, out)
            sides = [
                ComparedRun(_name_run(one), one.model_copy(update={"model": model}), directory / name)
                for one, name in ((reference, "reference"), (recipe, "chosen"))
            ]
            try:
                for side in sides:
                    run_side(side, steps, stopping)
            except TrainwrightError as error:
                if is_kept := isinstance(error, TrainingError):  # its message names a log
                    error.add_note(f"the output of both sides is in {directory}")
                raise
        return _compare(sides, TOLERANCES[recipe.train.mixed_precision], out)
    finally:
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)


def build_reference(recipe: RecipeSchema) -> RecipeSchema:
    """Return the same run on one process: the same global batches, divided into the same micro-batches.

    Raises:
        RequestError: the recipe already runs on one process.
    """
    processes, train = _read_process_count(recipe), recipe.train
    parallel = ParallelSection(strategy="single", num_processes=1)
    if recipe.parallel.is_one_process:
        raise RequestError(
            "parallel.strategy: this recipe runs on one process here (single), which is the reference; choose "
            "another strategy to compare, for instance parallel.strategy=fsdp parallel.num_processes=2"
        )
    # Dropout is drawn for each micro-batch, so the micro-batches must be equal.
    steps = train.gradient_accumulation_steps
    accumulation = steps * processes if train.micro_batch_size == "auto" and steps != "auto" else "auto"
    values = recipe.model_dump()
    values["parallel"] = parallel.model_dump()
    values["train"]["gradient_accumulation_steps"] = accumulation
    return type(recipe).model_validate(values)


def _prepare_model(
    recipe: RecipeSchema, machine: Machine, directory: Path, stopping: Stopping, out: TextIO
) -> ModelSection:
    """Cache data and weights, and return a model that one process can train."""
    work = functools.partial(_prepare, recipe, machine, directory)
    run_in_child(work, directory / "prepare.log", stopping)
    answer = json.loads((directory / "model.json").read_text(encoding="utf-8"))
    if answer["cut"]:
        say(f"model: {answer['cut']}", file=out)
    return ModelSection.model_validate(answer["model"])


def _prepare(recipe: RecipeSchema, machine: Machine, directory: Path) -> None:
    """Prepare in a child process, whose libraries and threads must not be in the parent of the workers."""
    run_directory.record(directory, dump_recipe(recipe), directory.name, [])
    prepare(directory)
    model, cut = (
        _choose_fitting_model(recipe.model, machine, directory / "model") if recipe.has_texts else (recipe.model, None)
    )
    answer = {"model": model.model_dump(), "cut": cut}
    (directory / "model.json").write_text(json.dumps(answer), encoding="utf-8")


def _choose_fitting_model(model: ModelSection, machine: Machine, directory: Path) -> tuple[ModelSection, str | None]:
    """Return the model, or one cut to its first layers if one process of this machine cannot train it in full.

    Args:
        directory: where a cut model is written.

    Returns:
        The section to train, and a message about the cut; None for the full model.

    Raises:
        MachineError: not even one layer fits, or the model cannot be cut.
    """
    from trainwright.models.load import load_config
    from trainwright.models.truncate_config import MAX_LAYERS, count_layers, count_parameters, cut_model

    config = load_config(model)
    memory = min((gpu.memory_bytes for gpu in machine.gpus), default=machine.memory_bytes)
    device = "one GPU" if machine.gpus else "this machine"
    parameters = count_parameters(config)
    if parameters * _BYTES <= memory * _USABLE:
        return model, None
    requirement = f"{format_count(parameters)} parameters with their optimizer need {format_bytes(parameters * _BYTES)}"
    problem = f"{requirement}, and {device} has {format_bytes(memory)}"
    layers = count_layers(config)
    try:
        for layers_kept in range(min(MAX_LAYERS, layers - 1), 0, -1):
            if count_parameters(config, layers_kept) * _BYTES <= memory * _USABLE:
                cut = cut_model(model, layers_kept, directory)
                return cut, f"both sides use only the first {layers_kept} of {layers} layers: {problem}"
    except (ValueError, TypeError, AttributeError) as error:  # of a configuration with other names
        raise MachineError(f"{problem}; and the model cannot be cut to fewer layers: {error}") from error
    raise MachineError(f"{problem}; not even one of its {layers} layers fits, so it cannot be compared")


def run_side(side: ComparedRun, steps: int, stopping: Stopping, *, is_shown: bool = True) -> None:
    """Take the first steps of a side in its run directory; only their events are kept.

    Raises:
        TrainingError: a process failed.
        Stopped: a stop was requested.
    """
    from trainwright.run.supervisor import launch

    side.run.mkdir()
    run_directory.record(side.run, dump_recipe(side.recipe), side.name, [])
    entry = functools.partial(_run_side_worker, side, steps, is_shown)
    code = launch(entry, processes=side.processes, logs=side.run / "logs", stopping=stopping)
    if code == EXIT_STOPPED or stopping.requested:
        raise Stopped("stopped; nothing was compared or kept")


def _run_side_worker(side: ComparedRun, steps: int, is_shown: bool) -> int:
    from trainwright.run.run_worker import TrialRun, Worker, run_worker

    return run_worker(
        Worker(side.run),
        observers=lambda run: _build_observers(side.name, steps) if is_shown else (),
        trial=TrialRun(steps),
    )


def _build_observers(name: str, steps: int) -> Sequence[Callable[[EventRecord], None]]:
    stream = find_console()
    return [] if stream is None else [_SideProgress(name, steps, stream)]


class _SideProgress:
    """Show the layout and the steps of a side while it runs."""

    def __init__(self, name: str, steps: int, stream: TextIO) -> None:
        self._name = name
        self._steps = steps
        self._progress = build_progress(stream, _SHOW_SECONDS)
        self._remaining = Remaining({})

    def __call__(self, event: EventRecord) -> None:
        if event["event"] == "start":
            self._steps = min(self._steps, event["max_steps"])
            self._progress.write(f"{self._name}: {event['layout']}")
            self._remaining = Remaining({"max_steps": self._steps})
            self._progress.begin(0, self._remaining)
        elif event["event"] == "step":
            self._remaining.see(event)
            self._progress.step(event)
        if event["event"] == "fault" or event.get("step") == self._steps:
            self._progress.close()


def _compare(sides: Sequence[ComparedRun], tolerance: float, out: TextIO) -> Comparison:
    left, right = sides
    comparison = Comparison.of_runs((left.name, right.name), (left.run, right.run), tolerance)
    say(file=out)
    comparison.show(out)
    say(comparison.verdict(), file=out)
    return comparison


def _read_process_count(recipe: RecipeSchema) -> int:
    processes = recipe.parallel.num_processes
    assert isinstance(processes, int), "a resolved recipe has no auto left"
    return processes


def _name_run(recipe: RecipeSchema) -> str:
    processes = _read_process_count(recipe)
    return recipe.parallel.strategy + (f" x {processes}" if processes > 1 else "")


# Relative, by `train.mixed_precision`: the effect of the order of summation within a few steps.
TOLERANCES = {"no": 1e-5, "bf16": 2e-2, "fp16": 2e-2}

_EXACT = ("tokens", "target_tokens", "learning_rate")
_CLOSE = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Comparison:
    """The steps of a reference and of another run, from their events."""

    names: tuple[str, str]
    steps: tuple[tuple[EventRecord, EventRecord], ...]
    tolerance: float

    @classmethod
    def of_runs(cls, names: tuple[str, str], runs: tuple[Path, Path], tolerance: float) -> Comparison:
        """Read the events of both runs.

        Raises:
            ValueError: their steps differ, or there are none.
        """
        left, right = ([e for e in read_events(run / "events.jsonl") if e["event"] == "step"] for run in runs)
        if not left or [e["step"] for e in left] != [e["step"] for e in right]:
            raise ValueError(f"{runs[0]} has {len(left)} steps and {runs[1]} has {len(right)}")
        return cls(names, tuple(zip(left, right, strict=True)), tolerance)

    @property
    def is_same(self) -> bool:
        """Whether the runs are equal within the tolerance."""
        return self.first_difference() is None

    def worst(self, field: str) -> float:
        """Return the largest relative difference of a field over the steps."""
        return max(_compute_difference(field, pair) for pair in self.steps)

    def first_difference(self) -> str | None:
        """Return a message about the first difference between the runs; None if they are equal."""
        for pair in self.steps:
            if (reason := self._describe_difference(pair)) is not None:
                return f"at step {pair[0]['step']} {reason}"
        return None

    def _describe_difference(self, pair: tuple[EventRecord, EventRecord]) -> str | None:
        left, right = pair
        for field in _EXACT:
            if left[field] != right[field]:
                return f"the {field.replace('_', ' ')} are {left[field]} and {right[field]}"
        for field, name in _CLOSE.items():
            apart = _compute_difference(field, pair)
            if not apart <= self.tolerance:
                return f"the {name} is {left[field]:.6g} and {right[field]:.6g}, {_format_difference(apart)} apart"
        return None

    def verdict(self) -> str:
        """Return a line that states whether the runs are the same, and the largest differences."""
        tolerance = f"tolerance {self.tolerance:.0e}, relative"
        reason = self.first_difference()
        if reason is not None:
            return f"NOT the same run: {reason} ({tolerance})"
        return (
            f"the same run: over {len(self.steps)} step{'s' * (len(self.steps) > 1)} losses differ by at most "
            f"{_format_difference(self.worst('loss'))} and gradient norms by "
            f"{_format_difference(self.worst('grad_norm'))} ({tolerance})"
        )

    def show(self, stream: TextIO) -> None:
        """Print the table of both runs, as a list on a terminal that is too narrow for it."""
        from rich.console import Console
        from rich.table import Table

        table = Table(highlight=False)
        table.add_column("step", justify="right")
        for name in _CLOSE.values():
            for run in self.names:
                table.add_column(f"{name}\n{run}", justify="right")
            table.add_column("relative\ndifference", justify="right")
        for pair in self.steps:
            table.add_row(*self._row(pair), style="bold red" if self._describe_difference(pair) else None)
        # Wide enough for the table if output is not a terminal. Console would take the width of standard output.
        width = text.find_terminal_width(stream, 120) if stream.isatty() else 120
        console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)
        options = console.options.update(max_width=1_000)
        if console.measure(table, options=options).maximum <= width:
            console.print(table)
            return
        columns = (*self.names, "relative difference")
        head = ["step", *(f"{name} {column}" for name in _CLOSE.values() for column in columns)]
        rows = [[f"step {pair[0]['step']}", *self._row(pair)[1:]] for pair in self.steps]
        for line in text.format_table([head, *rows], width):
            text.say(line, file=stream)

    def _row(self, pair: tuple[EventRecord, EventRecord]) -> Sequence[str]:
        cells = [str(pair[0]["step"])]
        for field in _CLOSE:
            left, right = (event[field] for event in pair)
            cells += [f"{left:.6f}", f"{right:.6f}", _format_difference(_compute_difference(field, pair))]
        return cells


def _format_difference(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def find_largest_loss(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest loss of steps and evaluations, or part of one, which rounding is relative to.

    A loss that is the difference of two parts can be near 0, and has the rounding of both.
    """
    losses = [0.0]
    for event in events:
        values = {"loss": event.get("loss"), **event.get("metrics", {})}
        losses += [abs(value) for name, value in values.items() if name.endswith("loss") and isinstance(value, float)]
    return max(losses)


def _compute_difference(field: str, pair: tuple[EventRecord, EventRecord]) -> float:
    """Return the difference relative to the larger value, of losses also to their larger part; 0 for two zeros."""
    left, right = (event[field] for event in pair)
    larger = max(abs(left), abs(right), find_largest_loss(pair) if field == "loss" else 0.0)
    return abs(left - right) / larger if larger else 0.0
