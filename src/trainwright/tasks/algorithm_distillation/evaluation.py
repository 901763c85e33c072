"""Evaluate a trained agent on tasks, with all ranks, against its source, random actions and the optimum.

Files written to a directory:

    eval_result.npz   returns of every episode, float32: sampled, greedy and random [tasks, copies, episodes]; source
                      [tasks, streams, episodes] if there are histories of the tasks (NaN for missing episodes);
                      tasks [tasks, p], optimum [tasks]
    metrics.json      means, with 95 % intervals
    returns.png       returns by episode
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoint
from trainwright.errors import RequestError
from trainwright.inference.finding import UnloadedModel, find_model
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World
from trainwright.recipe.loading import load_recipe
from trainwright.tasks.algorithm_distillation import in_context
from trainwright.tasks.algorithm_distillation.environments import Environment, check_stored
from trainwright.tasks.algorithm_distillation.histories import compute_episode_returns
from trainwright.tasks.algorithm_distillation.in_context import Returns, Trial
from trainwright.tasks.algorithm_distillation.model import ABOUT, HistoryModel, is_history_model, load_history_model
from trainwright.tasks.algorithm_distillation.objective import HistoryObjective, LossWeights
from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection
from trainwright.tasks.algorithm_distillation.task import (
    build_environment,
    open_histories,
    select_trial_tasks,
    shape_of,
)
from trainwright.utils.drawing import build_figure
from trainwright.utils.paths import expand_user_path

RESULT, METRICS, FIGURE = "eval_result.npz", "metrics.json", "returns.png"
_NORMAL_95 = 1.959964  # the normal distribution's 97.5 % quantile
_SHOWN_EPISODES = 10
_LABELS = {
    "sampled": "agent in its context",
    "greedy": "the same, greedy",
    "source": "source algorithm",
    "random": "random actions",
}
_COLORS = {"sampled": "tab:blue", "greedy": "tab:cyan", "source": "tab:orange", "random": "tab:grey"}


@dataclass(frozen=True)
class AgentRequest:
    """The agent to evaluate, and how; None: the value of the run's recipe."""

    model: str
    checkpoint: str | None = None
    episodes: int | None = None
    copies: int | None = None
    temperature: float | None = None
    greedy_after: int | None = None
    seed: int = 0


def is_agent(model: str) -> bool:
    """Return whether ``model`` is a history model, or a run or checkpoint of one. Reads no weights."""
    path = expand_user_path(model)
    recipe = path / "recipe.yaml"
    if recipe.is_file():
        return load_recipe(recipe).task == "algorithm_distillation"
    return is_history_model(path)


def find_agent(request: AgentRequest) -> tuple[UnloadedModel, AlgorithmDistillationSection]:
    """Return the location of the weights, and the section with the evaluation settings.

    Raises:
        RequestError: the agent does not exist.
    """
    path = expand_user_path(request.model)
    inside = path.resolve().parent if is_history_model(path) else path
    is_final = inside != path and path.name == "final" and (inside / "recipe.yaml").is_file()
    checkpoint = "final" if is_final else request.checkpoint
    agent = find_model(str(inside) if is_final else request.model, None, checkpoint, of_texts=False)
    section = _read_section(path) if agent.recipe is None else agent.recipe.own(AlgorithmDistillationSection)
    options = {key: getattr(request, key) for key in ("episodes", "copies", "temperature", "greedy_after")}
    trial = section.trial.model_copy(update={key: value for key, value in options.items() if value is not None})
    trial = trial.model_copy(update={"last_episodes": min(trial.last_episodes, trial.episodes)})
    return agent, section.model_copy(update={"trial": trial})


def _read_section(agent: Path) -> AlgorithmDistillationSection:
    """Return the section saved with a model that was copied out of its run."""
    _, about = load_history_model(agent)
    try:
        environment = about["environment"]
        check_stored(environment, str(agent / ABOUT))
        return AlgorithmDistillationSection.model_validate(
            {"environment": environment["name"], "environment_options": environment["options"], **about["tried"]}
        )
    except RequestError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"{agent}: agent.json does not name the environment and tasks to evaluate on: {error}"
        ) from error


def load_agent(agent: UnloadedModel, section: AlgorithmDistillationSection) -> HistoryObjective:
    """Return the model in evaluation mode on the CPU.

    Raises:
        RequestError: its files cannot be read.
    """
    if agent.checkpoint is None:
        assert agent.section.name is not None
        model, _ = load_history_model(Path(agent.section.name))
        return HistoryObjective(model, LossWeights()).eval()
    objective = HistoryObjective(HistoryModel(shape_of(section, build_environment(section)), agent.seed), LossWeights())
    with Checkpoint.open(agent.checkpoint, verify=False).open_reader() as read, torch.no_grad():
        for name, parameter in objective.named_parameters():
            parameter.copy_(read.weights(name, Shard.full(parameter)))
    return objective.eval()


# Receives a description and the number of steps; returns a function to call after every step.
Stage = Callable[[str, int], Callable[[], None]]


def work_on(request: AgentRequest, work: Path, world: World, stage: Stage) -> None:
    """Evaluate the agent with all ranks; rank 0 writes ``eval_result.npz`` to ``work``."""
    agent, section = find_agent(request)
    environment = build_environment(section)
    tasks = select_trial_tasks(section, environment)
    module = load_agent(agent, section).to(world.device)
    setup = section.trial
    trial = Trial(setup.episodes, setup.copies, setup.temperature, request.seed, greedy_after=setup.greedy_after)
    steps = trial.episodes * environment.horizon
    sampled_returns = in_context.evaluate_model(
        module, environment, tasks, trial, world, every_step=stage("actions drawn", steps)
    )
    likeliest = replace(trial, temperature=0.0)
    greedy = in_context.evaluate_model(
        module, environment, tasks, likeliest, world, every_step=stage("greedy actions", steps)
    )
    if not world.is_main:
        return
    arrays: dict[str, Any] = {
        "tasks": tasks.numpy(),
        "optimum": environment.optimal_return(tasks).numpy(),
        "sampled": sampled_returns,
        "greedy": greedy,
        "random": in_context.evaluate_random(environment, tasks, trial.copies, trial.episodes, request.seed),
    }
    source = _compute_source_returns(section, environment, tasks)
    if source is not None:
        arrays["source"] = source
    np.savez(work / RESULT, **arrays)


def _compute_source_returns(
    section: AlgorithmDistillationSection, environment: Environment, tasks: torch.Tensor
) -> Returns | None:
    """Return the returns of the source algorithm on the tasks, or None if there are no histories of them."""
    try:
        with open_histories(section, environment) as histories:
            rows = [histories.goal(index) for index in histories.find_indices(tasks)]
    except RequestError:  # none, of another environment, or not of all tasks
        return None
    returns_of_tasks = [compute_episode_returns(history.dones, history.rewards) for history in rows]
    longest = max(returns.shape[1] for returns in returns_of_tasks)
    padded_returns = [
        np.pad(values, ((0, 0), (0, longest - values.shape[1])), constant_values=np.nan) for values in returns_of_tasks
    ]
    return np.stack(padded_returns)


@dataclass(frozen=True)
class AgentReport:
    """The result: the arrays of ``eval_result.npz``, and the number of last episodes to average."""

    arrays: dict[str, Any]
    last_episodes: int

    @classmethod
    def of(cls, request: AgentRequest, work: Path) -> AgentReport:
        """Load the result of ``work_on``."""
        with np.load(work / RESULT) as file:
            return cls({name: file[name] for name in file.files}, find_agent(request)[1].trial.last_episodes)

    def metrics(self) -> dict[str, Any]:
        """Return mean returns of the first and the last episodes with intervals, and of every task at the end."""
        metrics: dict[str, Any] = {"optimum": _convert_to_number(self.arrays["optimum"].mean())}
        for name in self._list_agents():
            returns = self.arrays[name]
            parts = {"first": returns[..., :1], "last": select_last_episodes(returns, self.last_episodes)}
            metrics[name] = {
                key: dict(zip(("mean", "low", "high"), map(_convert_to_number, compute_interval(part)), strict=True))
                for key, part in parts.items()
            }
        if (best := average_best_copies(self.arrays["sampled"], self.last_episodes)) is not None:
            metrics["best_copy"] = {"last": _convert_to_number(best.mean())}
        tasks = self.arrays["tasks"].tolist()
        ends = in_context.mean_over_last(self.arrays["sampled"], self.last_episodes).mean(1)
        optimum = self.arrays["optimum"]
        metrics["tasks"] = [
            {"task": task, "return": float(end), "optimum": _convert_to_number(best)}
            for task, end, best in zip(tasks, ends, optimum, strict=True)
        ]
        return metrics

    def lines(self) -> Iterator[str]:
        """Yield the lines of a table of returns by episode, and of first and last returns with intervals."""
        agents = self._list_agents()
        episodes = self.arrays["sampled"].shape[-1]
        indices = sorted({round(i * (episodes - 1) / max(1, _SHOWN_EPISODES - 1)) for i in range(_SHOWN_EPISODES)})
        yield f"{'episode':<10}" + "".join(f"{name:>10}" for name in agents)
        for episode in indices:
            cells = (_format_mean_return(self.arrays[name], episode) for name in agents)
            yield f"{episode + 1:<10}" + "".join(f"{cell:>10}" for cell in cells)
        yield ""
        for name in agents:
            first = compute_interval(self.arrays[name][..., :1])
            last = compute_interval(select_last_episodes(self.arrays[name], self.last_episodes))
            yield (
                f"{name:<10} {_format_estimate(first)} at first, {_format_estimate(last)} over the last "
                f"{self.last_episodes}"
            )
        if (returns := average_best_copies(self.arrays["sampled"], self.last_episodes)) is not None:
            copies = self.arrays["sampled"].shape[1]
            yield f"{'best copy':<10} {returns.mean():6.2f} over the last {self.last_episodes}, of {copies} per task"
        best = self.arrays["optimum"].mean()
        if np.isfinite(best):
            yield f"{'optimum':<10} {best:.2f}"

    def write(self, directory: Path) -> None:
        """Write arrays, metrics and figure to a new directory."""
        directory.mkdir(parents=True)
        np.savez(directory / RESULT, **self.arrays)
        (directory / METRICS).write_text(json.dumps(self.metrics(), indent=2) + "\n", encoding="utf-8")
        _draw(self.arrays, directory / FIGURE)

    def _list_agents(self) -> list[str]:
        return [name for name in ("sampled", "greedy", "random", "source") if name in self.arrays]


def select_last_episodes(returns: Returns, count: int) -> Returns:
    """Return the last ``count`` episodes of each copy, from returns [..., episodes] padded with NaN."""
    is_finite = np.isfinite(returns)
    return np.take_along_axis(returns, np.argsort(is_finite, axis=-1, kind="stable"), -1)[..., -count:]


def average_best_copies(returns: Returns, count: int) -> Returns | None:
    """Return the mean of the last ``count`` episodes [tasks] of the copy that was best in those before, of each task.

    A copy is chosen by other episodes than are averaged, as when an agent is deployed. None if there are too few.

    Args:
        returns: [tasks, copies, episodes].
    """
    if returns.shape[1] < 2 or returns.shape[2] < 2 * count:
        return None
    copy_indices = returns[..., -2 * count : -count].mean(-1).argmax(1)
    return in_context.mean_over_last(returns, count)[np.arange(len(returns)), copy_indices]


def _draw(arrays: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG of mean returns with 95 % intervals, from the arrays of an evaluation.

    Raises:
        MachineError: matplotlib is not installed.
    """
    figure = build_figure(7, 4.5, "a figure")
    axes = figure.subplots()
    for name, label in _LABELS.items():
        if name not in arrays:
            continue
        returns = arrays[name]
        bounds = np.array([compute_interval(returns[..., episode, None]) for episode in range(returns.shape[-1])])
        episodes = np.arange(1, len(bounds) + 1)
        axes.plot(episodes, bounds[:, 0], label=label, color=_COLORS[name])
        axes.fill_between(episodes, bounds[:, 1], bounds[:, 2], color=_COLORS[name], alpha=0.2, linewidth=0)
    if np.isfinite(arrays["optimum"].mean()):
        axes.axhline(arrays["optimum"].mean(), color="black", linestyle=":", label="optimum")
    axes.set_xlabel("episode")
    axes.set_ylabel("return")
    axes.set_title(f"{len(arrays['tasks'])} tasks that were not trained on")
    axes.legend()
    figure.savefig(path, dpi=150)


def compute_interval(returns: Returns) -> tuple[float, float, float]:
    """Return the mean of returns [tasks, copies, ...], and its 95 % interval over other copies on the same tasks.

    The tasks are strata (Cochran 1977, chapter 5): the variance of a task's mean is that of its copies. Copies with
    only NaN are ignored; the result is NaN if a task has no others.
    """
    flat = returns.reshape(*returns.shape[:2], -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # from means of nothing, and the variance of one value
        copy_means = np.nanmean(flat, -1, dtype=np.float64)
        spread = np.nan_to_num(np.nanvar(copy_means, 1, ddof=1))
        mean = float(np.nanmean(copy_means, 1).mean())
    copies = np.maximum(np.isfinite(copy_means).sum(1), 1)
    error = _NORMAL_95 * float(np.sqrt((spread / copies).sum())) / len(returns)
    return mean, mean - error, mean + error


def _convert_to_number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _format_mean_return(returns: Returns, episode: int) -> str:
    mean = compute_interval(returns[..., episode : episode + 1])[0] if episode < returns.shape[-1] else np.nan
    return "-" if np.isnan(mean) else f"{mean:.2f}"


def _format_estimate(estimate: Sequence[float]) -> str:
    mean, low, high = estimate
    if np.isnan(mean):
        return f"{'-':>6}"
    return f"{mean:6.2f} [{low:.2f}, {high:.2f}]"
