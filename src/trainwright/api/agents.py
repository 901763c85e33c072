"""Measure a model of histories: how well it learns in its context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import RequestError
from trainwright.paths import user_path

if TYPE_CHECKING:
    from trainwright.parallel.world import World
    from trainwright.tasks.algorithm_distillation.evaluation import AgentReport, AgentRequest


def may_be_agent(model: str) -> bool:
    """Return whether the model may be an agent, so that importing torch to find out is worthwhile."""
    from trainwright.recipe.loading import load_recipe

    path = user_path(model)
    recipe = path / "recipe.yaml"
    return not load_recipe(recipe).has_texts if recipe.is_file() else (path / "agent.json").is_file()


def measure_agent(
    model: str,
    checkpoint: str | None,
    trial: Mapping[str, Any],
    of_texts: Mapping[str, Any],
    num_processes: int | None,
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
    from trainwright.api.processes.workers import in_processes, process_count, work_directory
    from trainwright.machine.detect import detect

    machine = detect()
    request = AgentRequest(model=model, checkpoint=checkpoint, **trial)
    processes = process_count(machine, num_processes)
    with work_directory("eval") as work:
        in_processes(
            functools.partial(_prepare, request),
            functools.partial(_entry, request, work),
            modules=["trainwright.tasks.algorithm_distillation.evaluation"],
            machine=machine,
            processes=processes,
            work=work,
        )
        return AgentReport.of(request, work)


def _prepare(request: AgentRequest) -> None:
    from trainwright.tasks.algorithm_distillation.evaluation import find_agent, load_agent

    load_agent(*find_agent(request))


def _entry(request: AgentRequest, work: Path, world: World) -> None:
    from trainwright.launch.process import console
    from trainwright.tasks.algorithm_distillation.evaluation import work_on

    stream = console()  # of rank 0, which takes as many steps as the other ranks

    def stage(label: str, total: int) -> Callable[[], None]:
        if stream is None:
            return lambda: None
        from trainwright.observe.counting import Counting

        counting = Counting(stream, label, total, "steps")
        return lambda: counting(1)

    work_on(request, work, world, stage)
