"""The results of a campaign: a row for each kind, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainwright.drilling.campaign import BROKEN, HELD, MISSED, SKIPPED
from trainwright.drilling.kinds import Trial

# Measured by some trials: seconds until the fault was reported, and until the next step; repeated steps.
_MEASURES = {"detection": "noticed", "recovery": "recovered", "lost": "steps lost"}


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
    """Return the table, the trials that did not hold with their reasons, and the kinds that could not be tried here."""
    rows = rows_of(found)
    width = max(len(row.kind) for row in rows)
    heads = ("tries", HELD, BROKEN, MISSED, SKIPPED, *_MEASURES.values())
    lines = [f"{'kind':{width}}" + "".join(f"{head:>{len(head) + 3}}" for head in heads)]
    for row in rows:
        counts = [str(row.count(*each)) for each in ((HELD, BROKEN, MISSED), (HELD,), (BROKEN,), (MISSED,), (SKIPPED,))]
        cells = [*counts, *(_shown(measure, row.median(measure)) for measure in _MEASURES)]
        columns = (f"{cell:>{len(head) + 3}}" for cell, head in zip(cells, heads, strict=True))
        lines.append(f"{row.kind:{width}}" + "".join(columns))
    for trial, line in found.items():
        if line and line["verdict"] in (BROKEN, MISSED):
            lines.append(f"\n{line['verdict']}: {trial.name} ({trial.case})\n  {line['why'][:1500]}")
    skipped = {(row.kind, why) for row in rows[:-1] for why in row.as_json()["skipped_because"]}
    lines += [f"not tried here: {kind}: {why}" for kind, why in sorted(skipped)]
    if left := sum(line is None for line in found.values()):
        lines.append(f"{left} of {len(found)} trials are left")
    return "\n".join(lines)


def _shown(measure: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if measure == "lost" else f"{value:.1f} s"
