"""Plot returns by episode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.drawing import new_figure

_LABELS = {
    "sampled": "agent in its context",
    "greedy": "the same, greedy",
    "source": "source algorithm",
    "random": "random actions",
}
_COLOURS = {"sampled": "tab:blue", "greedy": "tab:cyan", "source": "tab:orange", "random": "tab:grey"}


def draw(arrays: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG of mean returns with 95 % intervals, from the arrays of an evaluation.

    Raises:
        MachineError: matplotlib is not installed.
    """
    from trainwright.tasks.algorithm_distillation.evaluation import interval

    figure = new_figure(7, 4.5, "a figure")
    axes = figure.subplots()
    for name, label in _LABELS.items():
        if name not in arrays:
            continue
        returns = arrays[name]
        bounds = np.array([interval(returns[..., episode, None]) for episode in range(returns.shape[-1])])
        episodes = np.arange(1, len(bounds) + 1)
        axes.plot(episodes, bounds[:, 0], label=label, color=_COLOURS[name])
        axes.fill_between(episodes, bounds[:, 1], bounds[:, 2], color=_COLOURS[name], alpha=0.2, linewidth=0)
    if np.isfinite(arrays["optimum"].mean()):
        axes.axhline(arrays["optimum"].mean(), color="black", linestyle=":", label="optimum")
    axes.set_xlabel("episode")
    axes.set_ylabel("return")
    axes.set_title(f"{len(arrays['tasks'])} tasks that were not trained on")
    axes.legend()
    figure.savefig(path, dpi=150)
