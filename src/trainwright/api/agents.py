"""Agents: collect the histories of a learning algorithm, and measure how well a model of them learns in its context."""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.api.recipe import Recipe, extract_source
from trainwright.api.separate_process import (
    choose_process_count,
    create_work_directory,
    run_in_process,
    run_in_processes,
)
from trainwright.errors import RequestError, Stopped
from trainwright.machine.detect import detect
from trainwright.run.process import find_console
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_plural, say

if TYPE_CHECKING:
    from trainwright.parallel.world import World
    from trainwright.recipe.yaml_text import Tree
    from trainwright.tasks.algorithm_distillation.collection import Collection, CollectionProgress
    from trainwright.tasks.algorithm_distillation.evaluation import AgentReport, AgentRequest
    from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection


def may_be_agent(model: str) -> bool:
    """Return whether the model may be an agent, so that importing torch to find out is worthwhile."""
    from trainwright.recipe.loading import load_recipe

    path = expand_user_path(model)
    recipe = path / "recipe.yaml"
    return not load_recipe(recipe).has_texts if recipe.is_file() else (path / "agent.json").is_file()


def measure_agent(
    model: str, checkpoint: str | None, trial: Mapping[str, Any], of_texts: Mapping[str, Any], num_processes: int | None
) -> AgentReport | None:
    """Evaluate the agent and return the report, or None if the model is not an agent.

    Args:
        trial: episodes, copies, temperature and greedy_after, None if not given.
        of_texts: options for texts by name, with their values; they do not apply to agents.

    Raises:
        RequestError: an option that would have no effect, or an agent that cannot be evaluated.
    """
    from trainwright.tasks.algorithm_distillation.evaluation import AgentReport, AgentRequest, is_agent

    if not is_agent(model):
        return None
    if unread := [name for name, value in of_texts.items() if value]:
        raise RequestError(f"{unread[0]}: has no effect, because {model} acts in an environment and reads no texts")
    machine = detect()
    request = AgentRequest(model=model, checkpoint=checkpoint, **trial)
    processes = choose_process_count(machine, num_processes)
    with create_work_directory("eval") as work:
        run_in_processes(
            functools.partial(_prepare, request),
            functools.partial(_run_rank, request, work),
            modules=["trainwright.tasks.algorithm_distillation.evaluation"],
            machine=machine,
            processes=processes,
            work=work,
        )
        return AgentReport.of(request, work)


def _prepare(request: AgentRequest) -> None:
    from trainwright.tasks.algorithm_distillation.evaluation import find_agent, load_agent

    load_agent(*find_agent(request))


def _run_rank(request: AgentRequest, work: Path, world: World) -> None:
    from trainwright.tasks.algorithm_distillation.evaluation import work_on

    stream = find_console()  # of rank 0, which takes as many steps as the other ranks

    def stage(label: str, total: int) -> Callable[[], None]:
        if stream is None:
            return lambda: None
        from trainwright.run.observers.progress import Counting

        counting = Counting(stream, label, total, "steps")
        return lambda: counting(1)

    work_on(request, work, world, stage)


@dataclass(frozen=True)
class Collected:
    """A file of learning histories; ``str()`` gives what ``trainwright collect`` prints at its end.

    Attributes:
        path: the file.
        seconds: how long it took; None if the file was complete before.
        returns: the mean return of all tasks and streams, by episode; empty if no episode ended.
        optimum: the best mean return; None if the environment does not know it.
        chart: the plot of the learning curve, if asked for.
    """

    path: Path
    seconds: float | None
    returns: tuple[float, ...]
    optimum: float | None
    chart: Path | None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        how = "already collected" if self.seconds is None else f"written in {self.seconds:,.0f} s"
        yield f"{self.path}: {self.path.stat().st_size / 2**20:,.1f} MiB, {how}"
        if not self.returns:
            yield "no episode ended: algorithm_distillation.source.steps is shorter than an episode"
            return
        last = len(self.returns) - 1
        episodes = sorted({round(index * last / 7) for index in range(8)})
        by_episode = ", ".join(f"{self.returns[episode]:.2f} in episode {episode + 1}" for episode in episodes)
        yield f"mean return: {by_episode}" + (f"; at best {self.optimum:.2f}" if self.optimum is not None else "")
        if self.chart is not None:
            yield f"plot written to {self.chart}"


def collect(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    num_processes: int | None = None,
    chart: str | PathLike[str] | None = None,
    progress: bool = False,
) -> Collected:
    """Collect the histories that a recipe of Algorithm Distillation trains on; what ``trainwright collect`` does.

    If it is stopped, the same call continues: finished tasks are kept.

    Args:
        recipe: a `Recipe`, or the path of a recipe file, with task ``algorithm_distillation``.
        overrides: ``section.key=value``, the value in YAML.
        num_processes: number of processes, one core each. Default: one per core.
        chart: plot the algorithm's learning curve to this file.
        progress: show which tasks are finished.

    Raises:
        RequestError: the recipe is invalid, or the file exists with other histories.
        MachineError: the disk is full or not writable.
        TrainingError: a process ended early.
        Stopped: it was stopped by a signal.

    Examples:
        >>> import trainwright as tw
        >>> tw.collect("tiny.yaml")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: tiny.yaml: collect needs a recipe with task: algorithm_distillation
    """
    file = None if chart is None else Path(chart)
    return run_in_process(collect_and_show, extract_source(recipe), overrides, num_processes, file, progress=progress)


def collect_and_show(
    recipe: Path | Tree, overrides: tuple[str, ...] = (), num_processes: int | None = None, chart: Path | None = None
) -> Collected:
    """Collect and show the progress on standard output. Changes the signal handlers of this process."""
    from trainwright.recipe.loading import load_recipe
    from trainwright.tasks.algorithm_distillation.spec import find_section
    from trainwright.utils.drawing import check_chart

    section = find_section(load_recipe(recipe, overrides))
    if section is None:
        name = recipe if isinstance(recipe, Path) else "the recipe"
        raise RequestError(f"{name}: collect needs a recipe with task: algorithm_distillation")
    if ignored_overrides := [word for word in overrides if not word.startswith(("algorithm_distillation.", "task="))]:
        key = ignored_overrides[0].partition("=")[0]
        seed = "; for other histories set algorithm_distillation.source.seed" if key.endswith("seed") else ""
        raise RequestError(
            f"{key}: has no effect on what is collected, which the section algorithm_distillation describes{seed}; "
            "remove it"
        )
    from trainwright.tasks.algorithm_distillation.collection import collect

    collection = _build_collection(section)
    if chart is not None:
        check_chart(chart)
    processes = num_processes or detect().cpu_cores
    _announce(section, collection, processes)
    began = time.monotonic()
    try:
        with _raise_interrupts(), _GroupProgress() as progress:
            is_new = collect(collection, processes, progress)
    except KeyboardInterrupt:
        raise Stopped("stopped; finished tasks are kept: run the same command again to continue") from None
    return _summarize_collection(collection, time.monotonic() - began if is_new else None, chart)


def _build_collection(section: AlgorithmDistillationSection) -> Collection:
    from trainwright.tasks.algorithm_distillation.collection import Collection
    from trainwright.tasks.algorithm_distillation.task import build_environment

    environment = build_environment(section)
    count = section.source.tasks
    goals = list(range(len(environment.tasks())))
    if count is not None:
        goals, _ = environment.split_indices(section.split_seed, section.test_fraction)
        if count > len(goals):
            raise RequestError(
                f"algorithm_distillation.source.tasks: {count:,} is more than the {format_plural(len(goals), 'task')} "
                "of "
                f"{section.environment} that are not held out; lower it, or set it to null for all"
            )
        goals = goals[:count]
    path = expand_user_path(section.histories)
    return Collection(section.environment, environment.options, tuple(sorted(goals)), section.source.algorithm, path)


def _announce(section: AlgorithmDistillationSection, collection: Collection, processes: int) -> None:
    source = section.source
    tasks, streams = format_plural(len(collection.goals), "task"), format_plural(source.streams, "stream")
    say(
        f"{source.name} in {section.environment}: {tasks} x {streams} x "
        f"{format_plural(source.steps, 'step')}, {format_plural(processes, 'process', 'processes')}"
    )
    if source.name == "ppo" and source.steps <= source.ppo.rollout_steps:
        say(
            f"note: algorithm_distillation.source.steps: ppo updates every {source.ppo.rollout_steps} steps "
            f"(ppo.rollout_steps), so it does not learn in {source.steps}",
            file=sys.stderr,
        )


@contextmanager
def _raise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first SIGINT or SIGTERM; ignore further ones, which may be the same request."""

    def interrupt(*_: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _GroupProgress:
    """Show a progress bar on a terminal, or a line for each finished group of tasks elsewhere."""

    def __init__(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        self._console = Console(highlight=False)
        parts = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TextColumn("{task.percentage:.0f} %"))
        self._bar = bars.Progress(*parts, bars.TimeRemainingColumn(), console=self._console, transient=True)
        self._task = self._bar.add_task("tasks", total=1.0)
        self._said = -1

    def __enter__(self) -> _GroupProgress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, progress: CollectionProgress) -> None:
        text = f"{progress.goals} of {format_plural(progress.all_goals, 'task')}"
        self._bar.update(self._task, completed=progress.done, description=text)
        if not self._console.is_terminal and progress.goals != self._said:
            say(f"{text} finished")
        self._said = progress.goals


def _summarize_collection(collection: Collection, seconds: float | None, chart: Path | None) -> Collected:
    import numpy as np

    from trainwright.tasks.algorithm_distillation.collection import (
        compute_learning_curves,
        compute_mean_optimum,
        draw_curves,
    )
    from trainwright.tasks.algorithm_distillation.histories import Histories

    path = collection.path
    with Histories(path, collection.make_environment()) as histories:
        curves = compute_learning_curves(histories)
        if curves.shape[1] == 0:
            return Collected(path, seconds, (), None, None)
        best = compute_mean_optimum(histories)
        if chart is not None:
            draw_curves(histories, chart)
        returns = tuple(np.nanmean(curves, axis=0).tolist())
        return Collected(path, seconds, returns, float(best) if np.isfinite(best) else None, chart)
