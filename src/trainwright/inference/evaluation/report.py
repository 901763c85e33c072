"""The output of an evaluation: a directory, written completely or not at all, and a table.

metrics.json           every metric with its interval; with --against also the other model's and the differences
samples.jsonl          row by row: prompt, reference, answer, scores
samples-against.jsonl  those of the other model
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainwright import __version__
from trainwright.errors import RequestError
from trainwright.inference.evaluation.measure import Measurement, MetricDifferences
from trainwright.inference.evaluation.rows import CONFIDENCE, Estimate, estimate
from trainwright.models.files import replace_directory
from trainwright.utils.text import format_table


@dataclass(frozen=True)
class Report:
    """The result of one evaluation.

    Attributes:
        settings: the options of the evaluation, as plain values.
        harness: the results of lm-evaluation-harness, by task.
        parts: the results of each source alone, if there are several.
    """

    settings: Mapping[str, Any]
    measured: Measurement | None = None
    against: Measurement | None = None
    comparison: MetricDifferences | None = None
    harness: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Report] = field(default_factory=dict)

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Return every metric with its interval."""
        return _estimate_columns(self.measured)

    def lines(self) -> list[str]:
        """Return the table and its notes."""
        lines = []
        if self.measured is not None:
            if self.against is not None:
                lines = [f"A: {self.measured.origin}", f"B: {self.against.origin}", ""]
            lines += self._table()
            for name, part in self.parts.items():
                lines += ["", f"of {name}:", *part._table()]
            lines += [f"note: {note}" for note in self.measured.notes]
        if self.against is not None:
            lines += [f"note: against: {note}" for note in self.against.notes if self.measured is not None]
        if self.comparison is not None:
            lines += [f"note: {note}" for note in self.comparison.notes]
        if self.harness:
            lines += align_columns(_list_harness_rows(self.harness), ("task", "metric", "value", "standard error"))
        return lines

    def _table(self) -> list[str]:
        if self.against is None:
            estimates = self.estimates.items()
            return align_columns(
                [
                    [name, format_number(e.value), _format_interval(e, format_number), f"{e.n:,}"]
                    for name, e in estimates
                ],
                _HEAD,
            )
        assert self.measured is not None and self.against is not None and self.comparison is not None
        rows = []
        for name, column in self.measured.columns.items():
            difference = self.comparison.differences.get(name)
            other_column = self.against.columns.get(name)
            values = [
                format_number(column.value()),
                "" if other_column is None else format_number(other_column.value()),
            ]
            cells = (
                ["", ""]
                if difference is None
                else [_format_signed(difference.value), _format_interval(difference, _format_signed)]
            )
            rows.append([name, *values, *cells, f"{len(column):,}"])
        head = ("metric", "A", "B", "A - B", f"{CONFIDENCE:.0%} interval".replace("%", " %"), "rows")
        return align_columns(rows, head)

    def write(self, directory: Path) -> None:
        """Write all files to the new ``directory``. Raises RequestError if they cannot be written."""
        content: dict[str, Any] = {"trainwright": __version__, "settings": dict(self.settings), **self._numbers()}
        if self.harness:
            content["lm_eval"] = dict(self.harness)
        with complete_directory(directory) as scratch:
            for name, measured in (("samples", self.measured), ("samples-against", self.against)):
                if measured is not None:
                    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in measured.samples)
                    write_text(scratch / f"{name}.jsonl", "".join(lines))
            write_text(scratch / "metrics.json", json.dumps(content, indent=2, default=str) + "\n")

    def _numbers(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        if self.measured is not None:
            numbers |= _collect_values(self.measured, self.estimates)
        if self.against is not None and self.comparison is not None:
            differences = {name: asdict(difference) for name, difference in self.comparison.differences.items()}
            values = _collect_values(self.against, _estimate_columns(self.against))
            numbers["against"] = {**values, "difference": differences}
        if self.parts:
            numbers["sources"] = {name: part._numbers() for name, part in self.parts.items()}
        return numbers


@contextmanager
def complete_directory(directory: Path) -> Iterator[Path]:
    """Provide a temporary directory that is renamed to the new ``directory`` once everything is written.

    Raises:
        RequestError: something cannot be written.
    """
    try:
        with replace_directory(directory) as scratch:
            yield scratch
    except OSError as error:
        raise RequestError(f"--out: {directory} cannot be written: {error.strerror or error}") from error


_HEAD = ("metric", "value", f"{CONFIDENCE:.0%} interval".replace("%", " %"), "rows")


def _estimate_columns(measured: Measurement | None) -> dict[str, Estimate]:
    return {} if measured is None else {name: estimate(column) for name, column in measured.columns.items()}


def _collect_values(measured: Measurement, estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    metrics = {name: asdict(value) for name, value in estimates.items()}
    return {"model": measured.origin, "metrics": metrics, "notes": measured.notes}


def _list_harness_rows(harness: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for task, metrics in harness.items():
        for key, value in metrics.items():
            name, _, choice = key.partition(",")
            error = metrics.get(f"{name}_stderr,{choice}")
            if isinstance(value, float) and not name.endswith("_stderr"):
                label = name if choice in ("", "none") else f"{name} ({choice})"
                rows.append(
                    [task, label, format_number(value), format_number(error) if isinstance(error, float) else ""]
                )
    return rows


def align_columns(rows: Sequence[Sequence[str]], head: Sequence[str]) -> list[str]:
    """Return rows under their head, aligned in columns."""
    return list(format_table([head, *rows]))


def format_number(value: float) -> str:
    """Return a number formatted for tables: four decimals, or more if it is very small."""
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _format_signed(value: float) -> str:
    return f"{value:+.4f}" if abs(value) < 1000 else f"{value:+,.1f}"


def _format_interval(value: Estimate, words: Any) -> str:
    return "one row" if value.low is None or value.high is None else f"{words(value.low)} to {words(value.high)}"


def write_text(file: Path, text: str) -> None:
    """Write a file and sync it to disk."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
