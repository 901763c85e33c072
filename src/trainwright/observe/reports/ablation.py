"""``ablation.html``: the runs of an ablation in a table, a chart of the metric for each key, and all curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.observe.reports.charts import curve_charts, point_chart
from trainwright.observe.reports.figures import RunFigures
from trainwright.observe.reports.html import CURVE_MENU, Page, escaped, section, table
from trainwright.utils import text


def ablation_page(directory: Path, rows: Sequence[Mapping[str, Any]], metric: str, best: str) -> str:
    """Return the page. Raises RequestError if the script of charts is missing.

    Args:
        directory: contains the runs.
        rows: of `tw.Ablation`.
        metric: what the runs are compared by.
        best: the name of the best row.
    """
    page = Page("Ablation - Trainwright")
    page.add(f"<header><h1>Ablation</h1><p>Best by {escaped(metric)}: <b>{escaped(best)}</b></p></header>")
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    cells = [
        [row["name"], row["run"], row["step"], *(text.metric(row["metrics"].get(name, "")) for name in names)]
        for row in rows
    ]
    page.add(section("Runs", table(["", "Run", "Step", *(text.metric_name(name) for name in names)], cells)))
    keys = dict.fromkeys(key for row in rows for key in row["changes"])
    page.add(
        section(f"{metric} by key", page.charts([point_chart(key, metric, _points(rows, key, metric)) for key in keys]))
    )
    runs = [RunFigures.read(directory / name) for name in dict.fromkeys(row["run"] for row in rows)]
    page.add(section("Curves", CURVE_MENU, page.charts(curve_charts(runs))))
    return page.render()


def _points(rows: Sequence[Mapping[str, Any]], key: str, metric: str) -> list[dict[str, Any]]:
    """Return a point for each row that changes the key, as a number where all values are numbers."""
    measured = [row for row in rows if key in row["changes"] and metric in row["metrics"]]
    numbers = [_number(row["changes"][key]) for row in measured]
    values = numbers if None not in numbers else [row["changes"][key] for row in measured]
    return [
        {"place": value, "value": row["metrics"][metric], "run": row["name"], "steps": f"step {row['step']}"}
        for value, row in zip(values, measured, strict=True)
    ]


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
