"""The results of a campaign: a row for each kind, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright import text
from trainwright.drilling.campaign import BROKEN, HELD, MISSED, SKIPPED
from trainwright.drilling.kinds import Trial

# Measured by some trials: seconds until the fault was reported, and until the next step; repeated steps.
_MEASURES = {"detection": "noticed", "recovery": "recovered", "lost": "lost"}


@dataclass
class Row:
    """The results of the trials of one kind."""

    kind: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def count(self, *verdicts: str) -> int:
        """Return the number of trials with one of the verdicts."""
        return sum(line["verdict"] in verdicts for line in self.lines)

    def median(self, measure: str) -> float | None:
        """Return the median of a measure over the trials that have it."""
        found = [line[measure] for line in self.lines if measure in line]
        return round(statistics.median(found), 3) if found else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as a mapping; ``tries`` are the trials that were not skipped."""
        return {
            "kind": self.kind,
            "tries": self.count(HELD, BROKEN, MISSED),
            **{verdict: self.count(verdict) for verdict in (HELD, BROKEN, MISSED, SKIPPED)},
            **{f"median_{measure}": self.median(measure) for measure in (*_MEASURES, "start")},
            "skipped_because": sorted({line["why"] for line in self.lines if line["verdict"] == SKIPPED}),
        }


def rows_of(found: Mapping[Trial, dict[str, Any] | None]) -> list[Row]:
    """Return a row for each kind with a verdict, by name, and the last one for all."""
    rows: dict[str, Row] = {}
    for trial, line in sorted(found.items(), key=lambda item: item[0].name):
        if line is not None:
            rows.setdefault(trial.kind, Row(trial.kind)).lines.append(line)
    return [*rows.values(), Row("all", [line for row in rows.values() for line in row.lines])]


def table(found: Mapping[Trial, dict[str, Any] | None]) -> str:
    """Return the table, as wide as it is, with its notes."""
    return shown(cells(found), notes(found))


def cells(found: Mapping[Trial, dict[str, Any] | None]) -> list[list[str]]:
    """Return the cells of the table by row, the head first."""
    table = [["kind", "tries", HELD, BROKEN, MISSED, SKIPPED, *_MEASURES.values()]]
    for row in rows_of(found):
        counts = [str(row.count(*each)) for each in ((HELD, BROKEN, MISSED), (HELD,), (BROKEN,), (MISSED,), (SKIPPED,))]
        table.append([row.kind, *counts, *(_shown(measure, row.median(measure)) for measure in _MEASURES)])
    return table


def notes(found: Mapping[Trial, dict[str, Any] | None], refused: Mapping[str, str] | None = None) -> list[str]:
    """Return the trials that did not hold with their reasons, and what could not be tried here.

    Args:
        refused: strategies with numbers of processes that the recipe could not be trained with, and why.
    """
    lines = [
        f"\n{line['verdict']}: {trial.name} ({trial.case})\n  {line['why'][:1500]}"
        for trial, line in found.items()
        if line and line["verdict"] in (BROKEN, MISSED)
    ]
    skipped = {(row.kind, why) for row in rows_of(found)[:-1] for why in row.as_json()["skipped_because"]}
    skipped |= set((refused or {}).items())
    lines += [f"not tried here: {kind}: {why}" for kind, why in sorted(skipped)]
    if left := sum(line is None for line in found.values()):
        lines.append(f"{left} of {len(found)} trials are left")
    return lines


def shown(cells: Sequence[Sequence[str]], notes: Sequence[str], width: int | None = None) -> str:
    """Return the table and its notes as text.

    Args:
        width: columns of the terminal: if they are too few, what no trial has is left out. None: as many as needed.
    """
    lines = list(text.table(cells, numbers=True))
    if width is not None and max(map(len, lines)) > width:
        kept = [column for column in zip(*cells, strict=True) if {*column[1:]} - {"0", "-"}]
        lines = list(text.table([*zip(*kept, strict=True)], width, numbers=True))
    return "\n".join([*lines, *notes])


def _shown(measure: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g} step{'' if value == 1 else 's'}" if measure == "lost" else f"{value:.1f} s"
