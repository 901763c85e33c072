"""What each of several real processes does, to compare its collectives with simulated ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.engine.task import import_task_module
from trainwright.machine.cache import find_cache_root
from trainwright.planning.simulation.recorders import CollectiveLog, Phases, find_collective
from trainwright.recipe.loading import load_recipe
from trainwright.run.run_worker import Worker, run_worker


class RecordCollectives(TorchDispatchMode):
    """Record the collectives that this process calls within the context, of any process group."""

    def __init__(self, log: CollectiveLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective and call it."""
        if any(kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor takes itself apart first; it finds its layout with fake tensors
        if (collective := find_collective(func, args, kwargs or {})) is not None:
            self._log.note(collective)
        return func(*args, **(kwargs or {}))


def record(run: str) -> None:
    """Train the run in directory ``run``, and write the collectives of this rank in the last step."""
    directory, rank = Path(run), os.environ["RANK"]
    torch.set_num_threads(1)
    recipe = load_recipe(directory / "recipe.yaml")
    import_task_module(recipe).prepare_once(recipe, find_cache_root())
    phases = Phases()
    log = CollectiveLog(phases)
    with RecordCollectives(log):
        run_worker(Worker(directory), watch=phases.watch)
    (directory / f"collectives-{rank}.json").write_text(json.dumps(log.count_step(phases.finished)))
