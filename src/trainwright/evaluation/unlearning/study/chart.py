"""The plot of a study: how well each model has forgotten against how much it has kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from trainwright.drawing import new_figure
from trainwright.evaluation.unlearning.study.file import FULL, RETAIN
from trainwright.evaluation.unlearning.study.results import Results

_SMALLEST = 1e-300  # p-values that underflow to 0 are drawn here
_SIGNIFICANT = math.log10(0.05)
_GREY = "#555555"


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


def draw(results: Results, directory: Path) -> str | None:
    """Draw the plot in ``directory``; return its file name, or None if there is nothing to plot.

    Raises:
        MachineError: matplotlib is not installed.
    """
    for plot in _PLOTS:
        if points := _points(plot, results):
            break
    else:
        return None
    figure = new_figure(8, 4.5, "the plot of a study")
    axes = figure.subplots()
    for number, (name, point) in enumerate(points.items()):
        known = name in (FULL, RETAIN)
        marker, color = ("*" if name == FULL else "P", _GREY) if known else ("o", f"C{number}")
        axes.scatter(*point, s=60, marker=marker, color=color, label=name)
    if plot.of_quality:
        axes.axhline(_SIGNIFICANT, color="#a33", linestyle="--", linewidth=1, label="p = 0.05")
    axes.set_xlim(-0.02, max(1.0, *(kept for kept, _ in points.values())) + 0.05)
    axes.set_xlabel(plot.kept[2])
    axes.set_ylabel(plot.forgotten[2])
    axes.set_title(results.benchmark + (f"\nrows: {results.about}" if results.subset else ""), fontsize="medium")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(directory / plot.file, dpi=120)
    return plot.file


def _points(plot: _Plot, results: Results) -> dict[str, tuple[float, float]]:
    """Return the coordinates (kept, forgotten) of every model that has both; empty if no unlearned one has."""
    points = {}
    for name in results.models:
        kept, forgotten = (results.value(name, *what[:2]) for what in (plot.kept, plot.forgotten))
        if plot.of_quality and name == RETAIN:
            forgotten = 1.0  # it is its own reference
        if kept is None or forgotten is None or not math.isfinite(kept + forgotten):
            continue
        points[name] = kept, math.log10(max(forgotten, _SMALLEST)) if plot.of_quality else forgotten
    return points if set(points) - {FULL, RETAIN} else {}
