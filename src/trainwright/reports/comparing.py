"""Runs beside one another: what their recipes differ in, their curves, and their evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright import text
from trainwright.recipe.yaml_text import values_by_key
from trainwright.reports.charts import curve_charts
from trainwright.reports.figures import RunFigures
from trainwright.reports.html import AXIS_MENU, Page, section, table

# The same in no two runs.
_OWN = ("logging.run_directory",)
_MISSING = "-"


@dataclass(frozen=True)
class Difference:
    """A metric of a run less that of the first run, over the evaluations that both have made at the same steps.

    Attributes:
        mean: of the paired differences.
        interval: 95 % interval of the mean, by Student's t distribution; None for fewer than three pairs.
        pairs: how many steps both have.
    """

    metric: str
    run: str
    mean: float
    interval: tuple[float, float] | None
    pairs: int


def recipe_differences(runs: Sequence[RunFigures]) -> dict[str, list[str]]:
    """Return the keys whose values differ, with the value of every run."""
    flat = [dict(values_by_key(run.recipe)) for run in runs]
    keys = sorted({key for values in flat for key in values} - set(_OWN))
    rows = {key: [_shown(values.get(key, _MISSING)) for values in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def paired_differences(runs: Sequence[RunFigures]) -> list[Difference]:
    """Return the differences of all validation metrics between the first run and each other one."""
    first, *others = [_evaluations(run) for run in runs]
    found = []
    for run, other in zip(runs[1:], others, strict=True):
        for metric in first:
            steps = sorted(first[metric].keys() & other.get(metric, {}).keys())
            if steps:
                values = [other[metric][step] - first[metric][step] for step in steps]
                found.append(Difference(metric, run.name, sum(values) / len(values), _interval(values), len(values)))
    return found


def summary_rows(runs: Sequence[RunFigures]) -> Iterator[list[str]]:
    """Yield a row of figures for each run."""
    for run in runs:
        last = text.metric(float(run.steps[-1]["loss"])) if run.steps else _MISSING
        best = text.metric(run.best[1]) if run.best else _MISSING
        speed = f"{text.count(run.tokens_per_second)} tokens/s" if run.tokens_per_second else _MISSING
        trained = text.duration(sum(float(event["step_time"]) for event in run.steps))
        yield [run.name, run.status, f"{run.step:,}", last, best, speed, trained]


SUMMARY_HEAD = ("Run", "Status", "Step", "Loss", "Best validation", "Speed", "Time in steps")
DIFFERENCE_HEAD = ("Metric", "Run", "Mean difference", "95 % interval", "Evaluations")


def difference_row(found: Difference) -> list[str]:
    """Return a difference as text."""
    interval = "" if found.interval is None else f"{found.interval[0]:+.4g} to {found.interval[1]:+.4g}"
    return [found.metric, found.run, f"{found.mean:+.4g}", interval, str(found.pairs)]


def comparison_page(runs: Sequence[RunFigures]) -> str:
    """Return runs beside one another as a page. Raises RequestError if the script of charts is missing."""
    names = [run.name for run in runs]
    page = Page(f"{' and '.join(names[:3])} - Trainwright")
    page.add("<header><h1>Comparison of runs</h1></header>")
    page.add(section("Runs", table(SUMMARY_HEAD, summary_rows(runs))))
    page.add(section("Curves", AXIS_MENU, page.charts(curve_charts(runs))))
    if rows := [difference_row(each) for each in paired_differences(runs)]:
        note = (
            "<p>Each metric less that of the first run, at the steps that both evaluated. Lower is better for losses. "
            "The interval of the mean treats evaluations as independent.</p>"
        )
        page.add(section("Evaluations, paired by step", note, table(DIFFERENCE_HEAD, rows)))
    differences = [[key, *values] for key, values in recipe_differences(runs).items()]
    same = "<p>The recipes are the same.</p>"
    page.add(section("Recipes", table(["Key", *names], differences) if differences else same))
    return page.render()


def _evaluations(run: RunFigures) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for event in run.evaluations:
        for metric, value in (event.get("metrics") or {}).items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.setdefault(metric, {})[int(event["step"])] = float(value)
    return found


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 3:
        return None
    from trainwright.evaluation.libraries import require

    require("scipy", "a confidence interval")
    from scipy import stats

    mean, error = sum(values) / len(values), float(stats.sem(values))
    if error == 0:
        return mean, mean
    low, high = stats.t.interval(0.95, len(values) - 1, loc=mean, scale=error)
    return float(low), float(high)


def _shown(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if _is_plain(value) else str(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool)
