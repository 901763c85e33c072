"""Acting in context with a key-value cache against computing the whole context anew in every step.

    python bench/in_context_cache.py [--run RUN] [--copies 8] [--episodes 20]

Without a run, the model has the sizes of the recipe darkroom and random weights: the time is the same. Prints the
seconds of both, how many times faster the cache is, and whether all greedy actions were the same; exits with 1 where
they were not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from trainwright.models.history_context import Context
from trainwright.models.history_model import HistoryModel, Steps
from trainwright.recipe.loading import load_recipe
from trainwright.reinforcement.environments import Environment
from trainwright.tasks.algorithm_distillation.evaluation import AgentAsked, find_agent, load_agent
from trainwright.tasks.algorithm_distillation.goals import tasks_tried
from trainwright.tasks.algorithm_distillation.in_context import hop, play
from trainwright.tasks.algorithm_distillation.task import environment_of, section_of, shape_of

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "algorithm_distillation" / "darkroom.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a finished run of Algorithm Distillation")
    parser.add_argument("--copies", type=int, default=8, help="agents of each task (8)")
    parser.add_argument("--episodes", type=int, default=20, help="episodes in one context (20)")
    asked = parser.parse_args()
    if asked.run is not None:
        found, section = find_agent(AgentAsked(asked.run))
        model = load_agent(found, section).model
    else:
        section = section_of(load_recipe(RECIPE))
        model = HistoryModel(shape_of(section, environment_of(section)), seed=0).eval()
    environment = environment_of(section)
    tasks = tasks_tried(section, environment).repeat_interleave(asked.copies, 0)
    cached, anew = (_greedy(model, environment, tasks, asked.episodes, cached=kind) for kind in (True, False))
    same = bool(torch.equal(cached[1], anew[1]))
    faster = anew[0] / cached[0]
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "agents": len(tasks),
                "steps": asked.episodes * environment.horizon,
                "context": model.shape.steps,
                "seconds_cached": round(cached[0], 2),
                "seconds_anew": round(anew[0], 2),
                "times_faster": round(faster, 1),
                "same_actions": same,
            }
        )
    )
    sys.exit(0 if same else 1)


def _greedy(
    model: HistoryModel, environment: Environment, tasks: torch.Tensor, episodes: int, *, cached: bool
) -> tuple[float, torch.Tensor]:
    """Seconds, and every action taken [steps, n]."""
    context = Context(model.shape, len(tasks), moves_by=hop(model.shape, environment.horizon), cached=cached)
    taken: list[torch.Tensor] = []

    def policy(step: Steps) -> torch.Tensor:
        taken.append(context.logits(model, step).argmax(-1))
        return taken[-1]

    begun = time.perf_counter()
    play(policy, environment, tasks, episodes, torch.arange(len(tasks)), torch.device("cpu"))
    return time.perf_counter() - begun, torch.stack(taken)


if __name__ == "__main__":
    main()
