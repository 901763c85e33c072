"""Learning curves of algorithms from their histories: the return by episode, as a table and as a plot."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from trainwright.drawing import new_figure, save_chart
from trainwright.reinforcement.histories import Histories, returns_of_episodes

_MOST_LINES = 200


def learning_curves(histories: Histories) -> np.ndarray:
    """Return the mean return over the streams, float32 ``[goals, episodes]``; NaN where no stream has that many
    episodes.
    """
    curves = []
    for index in range(len(histories)):
        history = histories.goal(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # means over nothing, which are NaN as intended
            curves.append(np.nanmean(returns_of_episodes(history.dones, history.rewards), axis=0))
    found = np.full((len(curves), max(len(curve) for curve in curves)), np.nan, np.float32)
    for row, curve in zip(found, curves, strict=True):
        row[: len(curve)] = curve
    return found


def draw_curves(histories: Histories, file: Path) -> None:
    """Plot the return by episode: a line for each goal, their mean, and the mean of the optimum.

    Raises:
        RequestError: the format of ``file`` is not supported, or its directory does not exist.
        MachineError: matplotlib is not installed.
    """
    figure = new_figure(8, 5, "--chart")
    curves = learning_curves(histories)
    axes = figure.subplots()
    episodes = np.arange(1, curves.shape[1] + 1)
    for number, curve in enumerate(curves[:_MOST_LINES]):
        axes.plot(
            episodes, curve, color="tab:orange", alpha=0.25, linewidth=0.7, label="a task" if not number else None
        )
    axes.plot(episodes, np.nanmean(curves, axis=0), color="tab:blue", linewidth=2, label="mean of all tasks")
    if np.isfinite(best := optimum(histories)):
        axes.axhline(best, color="tab:grey", linestyle="--", label="mean of the optimum")
    axes.set_xlabel("episode")
    axes.set_ylabel(f"return, mean of {histories.streams} streams")
    axes.set_title(
        f"{histories.source.get('name', 'source')} in {histories.environment['name']}, {len(histories)} tasks"
    )
    axes.legend(loc="lower right", fontsize="small")
    save_chart(figure, file)


def optimum(histories: Histories) -> float:
    """Return the mean of the optimal returns of the tasks; NaN if one is not known."""
    environment = histories.make_environment()
    return float(environment.optimal_return(environment.tasks()[histories.goals]).mean())
