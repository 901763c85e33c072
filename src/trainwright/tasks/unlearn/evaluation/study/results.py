"""The results of a study: one row per model, as a table, as Markdown and as JSON, and the plot of how well each has
forgotten against how much it has kept.

    results.json   all metrics of all models, and the fraction of the full model's utility that each keeps
    results.md     the table
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.inference.evaluation.report import number_text, write_text
from trainwright.tasks.unlearn.evaluation.report import METRICS_FILE
from trainwright.tasks.unlearn.evaluation.study.file import FULL, RETAIN
from trainwright.utils.drawing import new_figure

KEPT = "utility_kept"
# Metric and set of the columns, if measured. Metrics not listed here have one column per set.
_COLUMNS = (
    ("answer_probability", "forget", "forget probability"),
    ("rouge_l_recall", "forget", "forget ROUGE-L"),
    ("verbatim_memorisation", "verbatim", "verbatim memorisation"),
    ("knowledge_memorisation", "forget", "forget knowledge"),
    ("truth_ratio", "forget", "forget truth ratio"),
    ("extraction_strength", "forget", "extraction strength"),
    ("forget_quality", "forget", "forget quality"),
    ("privleak", "forget", "PrivLeak, %"),
    ("answer_probability", "retain", "retain probability"),
    ("rouge_l_recall", "retain", "retain ROUGE-L"),
    ("knowledge_memorisation", "retain", "retain knowledge"),
    ("gibberish", "retain", "gibberish"),
    ("model_utility", "all", "model utility"),
    (KEPT, "all", "utility kept"),
)
_SMALLEST = 1e-300  # p-values that underflow to 0 are drawn here
_SIGNIFICANT = math.log10(0.05)
_GREY = "#555555"


@dataclass(frozen=True)
class Results:
    """The metrics of every model of a study, by model, metric and set; the full and the retain-only model first."""

    benchmark: str
    subset: Mapping[str, int]  # the number of first rows used of these sets
    models: Mapping[str, Mapping[str, Mapping[str, float]]]

    @classmethod
    def read(cls, benchmark: str, subset: Mapping[str, int], evaluations: Path, names: Sequence[str]) -> Results:
        """Read the results of the evaluations in ``evaluations``/<name>, for the full and the retain-only model and
        ``names``.
        """
        results: dict[str, dict[str, dict[str, float]]] = {}
        for name in (FULL, RETAIN, *names):
            about = json.loads((evaluations / name / METRICS_FILE).read_text(encoding="utf-8"))
            results[name] = dict(about["metrics"])
        best = results[FULL].get("model_utility", {}).get("all")
        if best:
            for metrics in results.values():
                metrics[KEPT] = {"all": metrics["model_utility"]["all"] / best}
        return cls(benchmark, subset, results)

    @classmethod
    def joined(cls, splits: Mapping[str, Results]) -> Results:
        """Return the models of several splits in one table, each named after its split too."""
        models = {f"{split} {name}": metrics for split, each in splits.items() for name, metrics in each.models.items()}
        return cls(", ".join(each.benchmark for each in splits.values()), {}, models)

    def value(self, model: str, metric: str, of: str) -> float | None:
        """Return a metric of a model; None if it was not measured."""
        return self.models[model].get(metric, {}).get(of)

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """Return the columns that at least one model has."""
        measured = dict.fromkeys(
            (metric, of) for metrics in self.models.values() for metric, values in metrics.items() for of in values
        )
        listed = {metric for metric, _, _ in _COLUMNS}
        others = ((metric, of, _title(metric, of)) for metric, of in measured if metric not in listed)
        return [*(column for column in _COLUMNS if column[:2] in measured), *others]

    @property
    def rows(self) -> list[list[str]]:
        """Return the table without its head."""
        return [[name, *(_cell(self.value(name, *column[:2])) for column in self.columns)] for name in self.models]

    @property
    def about(self) -> str:
        """Return a description of the rows used."""
        return ", ".join(f"{name} {count}" for name, count in self.subset.items())

    def markdown(self) -> str:
        """Return the table."""
        head = ["model", *(title for _, _, title in self.columns)]
        lines = [head, ["---"] * len(head), *self.rows]
        about = f"{self.benchmark}{f' (rows: {self.about})' if self.subset else ''}\n\n"
        return about + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def as_json(self) -> dict[str, Any]:
        """Return the object as JSON values."""
        return {"benchmark": self.benchmark, "subset": self.subset, "models": self.models}

    def write(self, directory: Path) -> list[str]:
        """Write the table and all metrics to ``directory``; return the names of the files."""
        files = {"results.json": json.dumps(self.as_json(), indent=2) + "\n", "results.md": self.markdown()}
        for name, text in files.items():
            write_text(directory / name, text)
        return list(files)


def _title(metric: str, of: str) -> str:
    words = metric.replace("_", " ")
    return words if of == "forget" else f"{words}, {of.replace('_', ' ')}"


def _cell(value: float | None) -> str:
    return "" if value is None else number_text(value)


@dataclass(frozen=True)
class _Plot:
    """A plot; ``kept`` and ``forgotten``: metric, set and label of the x axis and of the y axis."""

    file: str
    kept: tuple[str, str, str]
    forgotten: tuple[str, str, str]

    @property
    def of_quality(self) -> bool:
        """Return whether the y axis is a p-value."""
        return self.forgotten[0] == "forget_quality"


# The first one whose metrics were measured is drawn.
_PLOTS = (
    _Plot(
        "forget-quality.png",
        ("model_utility", "all", "model utility"),
        ("forget_quality", "forget", "forget quality, log10 of p"),
    ),
    *(
        _Plot(
            "forget-against-retain.png", (metric, "retain", f"{words}, retain"), (metric, "forget", f"{words}, forget")
        )
        for metric, words in (
            ("knowledge_memorisation", "knowledge memorisation"),
            ("answer_probability", "probability of the answers"),
        )
    ),
)


def draw(splits: Sequence[Results], directory: Path) -> str | None:
    """Draw the plot of one or more splits, side by side, in ``directory``; return its file name, or None if there is
    nothing to plot. The results of several requests are joined by a line, in their order.

    Raises:
        MachineError: matplotlib is not installed.
    """
    for plot in _PLOTS:
        panels = [(results, points) for results in splits if (points := _points(plot, results))]
        if panels:
            break
    else:
        return None
    figure = new_figure(3.5 + 4.5 * len(panels), 4.5, "the plot of a study")
    names = dict.fromkeys(name.partition(".")[0] for _, points in panels for name in points)
    colors = {name: _GREY if name in (FULL, RETAIN) else f"C{number}" for number, name in enumerate(names)}
    for axes, (results, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, plot, results, points, colors)
    handles = dict(pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(directory / plot.file, dpi=120)
    return plot.file


def _draw_panel(
    axes: Any, plot: _Plot, results: Results, points: Mapping[str, tuple[float, float]], colors: Mapping[str, str]
) -> None:
    for series, color in colors.items():
        own = {name: point for name, point in points.items() if name.partition(".")[0] == series}
        if not own:
            continue
        marker = {FULL: "*", RETAIN: "P"}.get(series, "o")
        xs, ys = zip(*own.values(), strict=True)
        axes.plot(xs, ys, marker=marker, markersize=8, linewidth=1, linestyle="-", color=color, label=series)
        for name, point in own.items():
            axes.annotate(name.partition(".")[2], point, xytext=(5, 5), textcoords="offset points", fontsize="small")
    if plot.of_quality:
        axes.axhline(_SIGNIFICANT, color="#a33", linestyle="--", linewidth=1, label="p = 0.05")
    axes.set_xlim(-0.02, max(1.0, *(utility for utility, _ in points.values())) + 0.05)
    axes.set_xlabel(plot.kept[2])
    axes.set_ylabel(plot.forgotten[2])
    axes.set_title(results.benchmark + (f"\nrows: {results.about}" if results.subset else ""), fontsize="medium")
    axes.grid(alpha=0.3)


def _points(plot: _Plot, results: Results) -> dict[str, tuple[float, float]]:
    """Return the coordinates (kept, forgotten) of every model that has both; empty if no unlearned one has."""
    points = {}
    for name in results.models:
        utility, forgotten = (results.value(name, *what[:2]) for what in (plot.kept, plot.forgotten))
        if plot.of_quality and name == RETAIN:
            forgotten = 1.0  # it is its own reference
        if utility is None or forgotten is None or not math.isfinite(utility + forgotten):
            continue
        points[name] = utility, math.log10(max(forgotten, _SMALLEST)) if plot.of_quality else forgotten
    return points if set(points) - {FULL, RETAIN} else {}
