"""A study as a picture: how well each model has forgotten against how much it can still do."""

from __future__ import annotations

import math
from pathlib import Path

from trainwright.drawing import new_figure
from trainwright.evaluation.unlearning.study.results import Results
from trainwright.recipe.study import FULL, RETAIN

NAME = "forget-quality.png"
_SMALLEST = 1e-300  # a p-value that is 0 to a computer is drawn here
_GREY = "#555555"


def draw(results: Results, file: Path) -> bool:
    """Write the plot; whether there was anything to plot. Raises MachineError where matplotlib is not installed."""
    points = {}
    for name in results.models:
        quality, utility = results.value(name, "forget_quality", "forget"), results.value(name, "model_utility", "all")
        if name == RETAIN:
            quality = 1.0  # it is its own reference
        if quality is not None and utility is not None:
            points[name] = (utility, math.log10(max(quality, _SMALLEST)))
    if not points:
        return False
    figure = new_figure(7, 4.5, "the plot of a study")
    axes = figure.subplots()
    for number, (name, (utility, quality)) in enumerate(points.items()):
        known = name in (FULL, RETAIN)
        axes.scatter(utility, quality, s=60, marker="*" if known else "o", color=_GREY if known else f"C{number}")
        axes.annotate(name, (utility, quality), xytext=(6, 4), textcoords="offset points", fontsize="small")
    axes.axhline(math.log10(0.05), color="#a33", linestyle="--", linewidth=1)
    axes.annotate("p = 0.05", (0, math.log10(0.05)), color="#a33", fontsize="small", va="bottom")
    axes.set_xlim(-0.02, max(1.0, *(utility for utility, _ in points.values())) + 0.05)
    axes.set_xlabel("model utility")
    axes.set_ylabel("forget quality, log10 of p")
    axes.set_title(results.benchmark + (f"\nrows: {results.about}" if results.subset else ""), fontsize="medium")
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    return True
