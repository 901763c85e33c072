"""Acting in context with a key-value cache against computing the whole context anew in every step.

    python bench/in_context_cache.py [--run RUN] [--copies 8] [--episodes 20]
    python bench/in_context_cache.py --recipe darkroom-compressed --episodes 200 --anew-episodes 20

Without a run, the model has the sizes of a recipe (darkroom) and random weights: the time is the same. Prints the
seconds of both, how many times faster the cache is, and whether all greedy actions were the same; exits with 1 where
they were not. Of acting with the cache also the milliseconds of a step and the tokens that the cache has room for, by
quarter of the episodes: where a context does not grow, neither do they.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.machine import describe, use_cores
from support.results import results_directory
from support.runs import write_results

from trainwright.recipe.loading import load_recipe
from trainwright.tasks.algorithm_distillation.environments import Environment
from trainwright.tasks.algorithm_distillation.evaluation import AgentRequest, find_agent, load_agent
from trainwright.tasks.algorithm_distillation.in_context import Context, choose_context_stride, play
from trainwright.tasks.algorithm_distillation.model import HistoryModel, Steps
from trainwright.tasks.algorithm_distillation.spec import AlgorithmDistillationSection
from trainwright.tasks.algorithm_distillation.task import build_environment, select_trial_tasks, shape_of

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "algorithm_distillation"
RESULTS = results_directory()
QUARTERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="darkroom", help="whose sizes a model without a run has (darkroom)")
    parser.add_argument("--run", help="a finished run of Algorithm Distillation")
    parser.add_argument("--copies", type=int, default=8, help="agents of each task (8)")
    parser.add_argument("--episodes", type=int, default=20, help="episodes in one context (20)")
    parser.add_argument("--anew-episodes", type=int, help="episodes without the cache, where fewer are enough")
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores that they are kept to (1)")
    parser.add_argument("--output", type=Path, help="file of results (results/in_context_cache_<context>.json)")
    asked = parser.parse_args()
    machine = describe(use_cores(asked.threads))
    torch.set_num_threads(asked.threads)
    model, section = _model(asked.run, asked.recipe)
    environment = build_environment(section)
    tasks = select_trial_tasks(section, environment).repeat_interleave(asked.copies, 0)
    few = min(asked.anew_episodes or asked.episodes, asked.episodes)
    cached = _greedy(model, environment, tasks, asked.episodes, cached=True)
    anew = _greedy(model, environment, tasks, few, cached=False)
    steps = few * environment.horizon
    same = bool(torch.equal(torch.stack(cached.actions[:steps]), torch.stack(anew.actions)))
    found = {
        "trained": asked.run is not None,
        "agents": len(tasks),
        "context": section.context_length,
        "kind": section.context if section.context == "full" else section.compression,
        "episodes": asked.episodes,
        "steps_compared": steps,
        "seconds_cached": round(sum(cached.seconds[:steps]), 2),
        "seconds_anew": round(sum(anew.seconds), 2),
        "times_faster": round(sum(anew.seconds) / sum(cached.seconds[:steps]), 1),
        "same_actions": same,
        "by_quarter": cached.by_quarter(),
    }
    print(json.dumps(found, indent=1))
    write_results(asked.output or RESULTS / f"in_context_cache_{found['kind']}.json", {"machine": machine, **found})
    sys.exit(0 if same else 1)


def _model(run: str | None, recipe: str) -> tuple[HistoryModel, AlgorithmDistillationSection]:
    if run is not None:
        found, section = find_agent(AgentRequest(run))
        return load_agent(found, section).model, section
    section = load_recipe(RECIPES / f"{recipe}.yaml").own(AlgorithmDistillationSection)
    return HistoryModel(shape_of(section, build_environment(section)), seed=0).eval(), section


@dataclass
class _Played:
    """What every step of all agents took (seconds), held (tokens in the cache, bytes of the process), and did."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    actions: list[torch.Tensor] = field(default_factory=list)

    def by_quarter(self) -> list[dict[str, Any]]:
        size = len(self.seconds) // QUARTERS
        parts = [slice(quarter * size, (quarter + 1) * size) for quarter in range(QUARTERS)]
        return [
            {
                "milliseconds_a_step": round(1e3 * sum(self.seconds[part]) / size, 3),
                "cache_tokens": max(self.tokens[part]),
                "peak_memory_mib": round(max(self.memory[part]) / 2**20, 1),
            }
            for part in parts
        ]


def _greedy(
    model: HistoryModel, environment: Environment, tasks: torch.Tensor, episodes: int, *, cached: bool
) -> _Played:
    context = Context(
        model.shape, len(tasks), moves_by=choose_context_stride(model.shape, environment.horizon), cached=cached
    )
    played = _Played()

    def policy(step: Steps) -> torch.Tensor:
        begun = time.perf_counter()
        actions = context.logits(model, step).argmax(-1)
        played.seconds.append(time.perf_counter() - begun)
        played.tokens.append(context.cache_tokens)
        played.memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        played.actions.append(actions)
        return actions

    play(policy, environment, tasks, episodes, torch.arange(len(tasks)), torch.device("cpu"))
    return played


if __name__ == "__main__":
    main()
