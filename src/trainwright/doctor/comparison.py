"""Compare two runs of one recipe step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from trainwright.engine.event_reader import EventRecord, read_events
from trainwright.utils import text

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
        one, other = ([e for e in read_events(run / "events.jsonl") if e["event"] == "step"] for run in runs)
        if not one or [e["step"] for e in one] != [e["step"] for e in other]:
            raise ValueError(f"{runs[0]} has {len(one)} steps and {runs[1]} has {len(other)}")
        return cls(names, tuple(zip(one, other, strict=True)), tolerance)

    @property
    def is_same(self) -> bool:
        """Whether the runs are equal within the tolerance."""
        return self.first_difference() is None

    def worst(self, field: str) -> float:
        """Return the largest relative difference of a field over the steps."""
        return max(_apart(field, pair) for pair in self.steps)

    def first_difference(self) -> str | None:
        """Return a message about the first difference between the runs; None if they are equal."""
        for pair in self.steps:
            if (reason := self._difference_in(pair)) is not None:
                return f"at step {pair[0]['step']} {reason}"
        return None

    def _difference_in(self, pair: tuple[EventRecord, EventRecord]) -> str | None:
        one, other = pair
        for field in _EXACT:
            if one[field] != other[field]:
                return f"the {field.replace('_', ' ')} are {one[field]} and {other[field]}"
        for field, name in _CLOSE.items():
            apart = _apart(field, pair)
            if not apart <= self.tolerance:
                return f"the {name} is {one[field]:.6g} and {other[field]:.6g}, {_short(apart)} apart"
        return None

    def verdict(self) -> str:
        """Return a line that states whether the runs are the same, and the largest differences."""
        allowed = f"tolerance {self.tolerance:.0e}, relative"
        reason = self.first_difference()
        if reason is not None:
            return f"NOT the same run: {reason} ({allowed})"
        return (
            f"the same run: over {len(self.steps)} step{'s' * (len(self.steps) > 1)} losses differ by at most "
            f"{_short(self.worst('loss'))} and gradient norms by {_short(self.worst('grad_norm'))} ({allowed})"
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
            table.add_row(*self._row(pair), style="bold red" if self._difference_in(pair) else None)
        # Wide enough for the table if output is not a terminal. Console would take the width of standard output.
        width = text.columns(stream, 120) if stream.isatty() else 120
        console = Console(file=stream, highlight=False, markup=False, emoji=False, width=width)
        unbounded = console.options.update(max_width=1_000)
        if console.measure(table, options=unbounded).maximum <= width:
            console.print(table)
            return
        head = ["step", *(f"{name} {one}" for name in _CLOSE.values() for one in (*self.names, "relative difference"))]
        rows = [[f"step {pair[0]['step']}", *self._row(pair)[1:]] for pair in self.steps]
        for line in text.table([head, *rows], width):
            text.say(line, file=stream)

    def _row(self, pair: tuple[EventRecord, EventRecord]) -> Sequence[str]:
        cells = [str(pair[0]["step"])]
        for field in _CLOSE:
            one, other = (event[field] for event in pair)
            cells += [f"{one:.6f}", f"{other:.6f}", _short(_apart(field, pair))]
        return cells


def _short(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def magnitude(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest loss of steps and evaluations, or part of one, which rounding is relative to.

    A loss that is the difference of two parts can be near 0, and has the rounding of both.
    """
    losses = [0.0]
    for event in events:
        values = {"loss": event.get("loss"), **event.get("metrics", {})}
        losses += [abs(value) for name, value in values.items() if name.endswith("loss") and isinstance(value, float)]
    return max(losses)


def _apart(field: str, pair: tuple[EventRecord, EventRecord]) -> float:
    """Return the difference relative to the larger value, of losses also to their larger part; 0 for two zeros."""
    one, other = (event[field] for event in pair)
    larger = max(abs(one), abs(other), magnitude(pair) if field == "loss" else 0.0)
    return abs(one - other) / larger if larger else 0.0
