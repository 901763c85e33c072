"""``trainwright collect``: let an algorithm learn in an environment, and record its learning histories."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.cli.recipe import Overrides
from trainwright.errors import EXIT_STOPPED, RequestError
from trainwright.paths import user_path
from trainwright.text import plural, say

if TYPE_CHECKING:
    from trainwright.reinforcement.collection import Collection, Progress
    from trainwright.tasks.algorithm_distillation.section import AlgorithmDistillationSection


def collect(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe with task algorithm_distillation.")],
    overrides: Overrides = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes, one core each. Default: one per core.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Plot the algorithm's learning curve to this file.")
    ] = None,
) -> None:
    """Collect the histories that a recipe trains on.

    If stopped, the same command continues: finished tasks are kept. Ends with 75 when stopped by a signal.
    """
    from trainwright.drawing import check_chart
    from trainwright.machine.detect import detect
    from trainwright.recipe.loading import load_recipe
    from trainwright.reinforcement.collection import collect as collect_histories
    from trainwright.tasks.algorithm_distillation.spec import section_of

    section = section_of(load_recipe(recipe, overrides or []))
    if section is None:
        raise RequestError(f"{recipe}: collect needs a recipe with task: algorithm_distillation")
    collection = _collection(section)
    if chart is not None:
        check_chart(chart)
    processes = num_processes or detect().cpu_cores
    source = section.source
    tasks, streams = plural(len(collection.goals), "task"), plural(source.streams, "stream")
    say(
        f"{source.name} in {section.environment}: {tasks} x {streams} x "
        f"{plural(source.steps, 'step')}, {plural(processes, 'process', 'processes')}"
    )
    if source.name == "ppo" and source.steps <= source.ppo.rollout_steps:
        say(
            f"note: algorithm_distillation.source.steps: ppo updates every {source.ppo.rollout_steps} steps "
            f"(ppo.rollout_steps), so it does not learn in {source.steps}",
            file=sys.stderr,
        )
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _Shown() as shown:
            made = collect_histories(collection, processes, shown)
    except KeyboardInterrupt:
        say("stopped; finished tasks are kept: run the same command again to continue", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED) from None
    size = collection.path.stat().st_size / 2**20
    how = f"written in {time.monotonic() - began:,.0f} s" if made else "already collected"
    say(f"{collection.path}: {size:,.1f} MiB, {how}")
    _summarise(collection.path, chart)


def _collection(section: AlgorithmDistillationSection) -> Collection:
    from trainwright.reinforcement.collection import Collection
    from trainwright.tasks.algorithm_distillation.task import environment_of

    environment = environment_of(section)
    count = section.source.tasks
    goals = list(range(len(environment.tasks())))
    if count is not None:
        goals, _ = environment.split_indices(section.split_seed, section.test_fraction)
        if count > len(goals):
            raise RequestError(
                f"algorithm_distillation.source.tasks: {count:,} is more than the {plural(len(goals), 'task')} of "
                f"{section.environment} that are not held out; lower it, or set it to null for all"
            )
        goals = goals[:count]
    path = user_path(section.histories)
    return Collection(section.environment, environment.options, tuple(sorted(goals)), section.source.algorithm, path)


class _Shown:
    """Show a progress bar on a terminal, or a line for each finished group of tasks elsewhere."""

    def __init__(self) -> None:
        from rich import progress as bars
        from rich.console import Console

        self._console = Console(highlight=False)
        parts = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TextColumn("{task.percentage:.0f} %"))
        self._bar = bars.Progress(*parts, bars.TimeRemainingColumn(), console=self._console, transient=True)
        self._task = self._bar.add_task("tasks", total=1.0)
        self._said = -1

    def __enter__(self) -> _Shown:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        said = f"{progress.goals} of {plural(progress.all_goals, 'task')}"
        self._bar.update(self._task, completed=progress.done, description=said)
        if not self._console.is_terminal and progress.goals != self._said:
            say(f"{said} finished")
        self._said = progress.goals


def _summarise(path: Path, chart: Path | None) -> None:
    import numpy as np

    from trainwright.reinforcement.curves import draw_curves, learning_curves, optimum
    from trainwright.reinforcement.histories import Histories

    with Histories(path) as histories:
        curves = learning_curves(histories)
        if curves.shape[1] == 0:
            say("no episode ended: algorithm_distillation.source.steps is shorter than an episode")
            return
        mean = np.nanmean(curves, axis=0)
        shown = sorted({round(place) for place in np.linspace(0, len(mean) - 1, min(len(mean), 8))})
        by_episode = ", ".join(f"{mean[episode]:.2f} in episode {episode + 1}" for episode in shown)
        best = optimum(histories)
        say(f"mean return: {by_episode}" + (f"; at best {best:.2f}" if np.isfinite(best) else ""))
        if chart is not None:
            draw_curves(histories, chart)
            say(f"plot written to {chart}")
