"""What each of several real processes does, to compare its collectives with simulated ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from trainwright.machine.cache import cache_root
from trainwright.planning.simulation.phases import Phases
from trainwright.planning.simulation.recorders.collectives import CollectiveLog, RecordCollectives
from trainwright.recipe.loading import load_recipe
from trainwright.run.run_worker import Worker, run_worker
from trainwright.tasks.registry import task_module


def record(run: str) -> None:
    """Train the run in directory ``run``, and write the collectives of this rank in the last step."""
    directory, rank = Path(run), os.environ["RANK"]
    torch.set_num_threads(1)
    recipe = load_recipe(directory / "recipe.yaml")
    task_module(recipe).prepare_once(recipe, cache_root())
    phases = Phases()
    log = CollectiveLog(phases)
    with RecordCollectives(log):
        run_worker(Worker(directory), watch=phases.watch)
    (directory / f"collectives-{rank}.json").write_text(json.dumps(log.of_step(phases.finished)))
