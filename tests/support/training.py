"""Whole trainings of `tiny` in processes that have joined a group once: many cases for the price of one start.

To be called through `Runs.function`, which makes the processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.engine.checkpoints.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.events import EventLog, Record
from trainwright.engine.optimizer import Schedule, build_optimizer_factory
from trainwright.engine.policies.base import TrainingContext
from trainwright.engine.task import Task, import_task_module
from trainwright.engine.trainer import Trainer
from trainwright.machine.cache import find_cache_root
from trainwright.machine.detect import detect
from trainwright.models.causal_lm import compile_blocks
from trainwright.models.recompute import save_activation_memory
from trainwright.parallel.strategy import Strategy, StrategyConfig, build_strategy
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.resolve import resolve

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))  # without a process group
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One training: overrides of `tiny`, and how far it goes.

    `until`: stops after this step, leaving a checkpoint. `checkpoints`: where they are, and what it continues from.
    """

    overrides: tuple[str, ...]
    until: int | None = None
    checkpoints: str | None = None


@dataclass(frozen=True)
class Trained:
    """What a training gave: its events, and the bytes each rank had of parameters and optimizer state."""

    events: list[Record]
    bytes: list[float]

    def column(self, name: str) -> list[float]:
        return [event[name] for event in self.events if event["event"] == "step"]

    def metrics(self) -> list[dict[str, float]]:
        return [event["metrics"] for event in self.events if event["event"] == "evaluate"]

    def faults(self) -> list[Record]:
        return [event for event in self.events if event["event"] == "fault"]

    def texts(self) -> list[str]:
        return [event["text"] for event in self.events if event["event"] == "generate"]


def train(runs: Runs, cases: Mapping[Any, Case], processes: int) -> dict[Any, Trained]:
    """Train every case with as many processes."""
    directory = runs.new_directory("trained")
    directory.mkdir()
    wanted = [[list(case.overrides), case.until, case.checkpoints] for case in cases.values()]
    runs.function("tests.support.training:in_process", wanted, str(directory), processes=processes)
    results = [json.loads((directory / f"{index}.json").read_text()) for index in range(len(wanted))]
    return {key: Trained(**result) for key, result in zip(cases, results, strict=True)}


def in_process(cases: Sequence[tuple[list[str], int | None, str | None]], directory: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    world = join("cpu")
    for index, (overrides, until, checkpoints) in enumerate(cases):
        run = Path(directory) / f"run-{index}"
        trained = _train(world, overrides, run, until, Path(checkpoints) if checkpoints else run)
        if world.is_main:
            (Path(directory) / f"{index}.json").write_text(json.dumps(trained))
    leave()


def built(world: World, overrides: Iterable[str]) -> tuple[RecipeSchema, Task, Strategy]:
    """`tiny` with these overrides, spread over the world as a worker does it."""
    fixed = (ON_ROWS, f"parallel.num_processes={world.size}")
    recipe = resolve(load_recipe(TINY, [*fixed, *overrides]), detect()).recipe
    task = import_task_module(recipe).build(recipe, find_cache_root())
    if task.weights is not None:
        task.weights.load(world.rank)
    save_activation_memory(
        task.blocks(), recipe.train.activation_checkpointing, offload=recipe.train.activation_offload
    )
    if recipe.train.compile is True:
        compile_blocks(task.blocks())
    make, dtype = build_optimizer_factory(recipe.optimizer), DTYPES[str(recipe.train.mixed_precision)]
    seed = None if recipe.optimizer.master_weights else recipe.train.seed
    setup = StrategyConfig(recipe.parallel, world, task.module, make, dtype, task.blocks(), task.weights, seed)
    return recipe, task, build_strategy(setup)


def trainer_of(
    world: World, overrides: Iterable[str], run: Path, until: int | None = None, directory: Path | None = None
) -> tuple[Trainer, list[Record]]:
    """A trainer of `tiny` with these overrides, and the list that its events go to.

    Args:
        until: as of ``Case``.
        directory: of the checkpoints; the run's if None.
    """
    recipe, task, strategy = built(world, [f"logging.run_directory={run}", *overrides])
    seen: list[Record] = []
    events = EventLog(run / "events.jsonl" if world.is_main else None, [seen.append])
    trainer = Trainer(
        TrainingContext(recipe, "", task, strategy, events),
        schedule=Schedule(recipe.optimizer, len(task.stream)),
        checkpoints=Checkpoints(directory or run, keep_last=1, keep_best=False),
        stop_requested=lambda: until is not None and trainer.progress.step + 1 >= until,
    )
    return trainer, seen


def _train(world: World, overrides: Iterable[str], run: Path, until: int | None, directory: Path) -> dict[str, Any]:
    trainer, seen = trainer_of(world, overrides, run, until, directory)
    steps = trainer.checkpoints.steps()
    world.barrier()
    if steps:
        trainer.resume(Checkpoint.open(trainer.checkpoints.path(steps[-1])))
    trainer.run(run / "final")
    shards = trainer.strategy.state().values()
    held = world.gather(sum(shard.local.numel() * shard.local.element_size() for shard in shards))
    return {"events": json.loads(json.dumps(seen, default=str)), "bytes": held}
