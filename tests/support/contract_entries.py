"""What one of several processes does in tests of the contract: something is not as the recipe says, on one rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainwright.engine.optimizer import build_optimizer_factory
from trainwright.engine.task import import_task_module
from trainwright.errors import MachineError
from trainwright.machine.cache import find_cache_root
from trainwright.parallel.strategy import StrategyConfig, build_strategy
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.parallel import ParallelSection
from trainwright.run.group.contract import check_agreement, check_layout


def refused(kind: str, run: str) -> int:
    """Go up to the first step of ``run``; the MachineError that stops this rank goes to ``run``/refused-<rank>."""
    rank = int(os.environ["RANK"])
    try:
        _go(kind, Path(run), rank)
    except MachineError as error:
        Path(run, f"refused-{rank}").write_text(str(error))
        return 0
    raise AssertionError("nothing stopped this rank")


def _go(kind: str, run: Path, rank: int) -> None:
    tampered = rank == 1
    if kind == "setting" and tampered:
        torch.set_float32_matmul_precision("high")
    changes = {"recipe": ["train.seed=1"] if tampered else [], "device": ["parallel.device=cuda"]}
    recipe = load_recipe(run / "recipe.yaml", changes.get(kind, []))
    parallel = recipe.parallel
    if kind == "another strategy":
        parallel = ParallelSection(strategy="ddp", num_processes=parallel.num_processes)
    task = import_task_module(recipe).build(recipe.model_copy(update={"parallel": parallel}), find_cache_root())
    if task.weights is not None:
        task.weights.load(rank)
    if kind == "weights" and tampered:
        with torch.no_grad():
            next(task.module.parameters()).mul_(1.001)
    world = join("cpu")
    try:
        check_agreement(recipe, task, world)
        dtype = torch.bfloat16 if kind == "dtype" and tampered else torch.float32
        if kind == "alone" and tampered:
            world = World(rank=0, size=1, local_rank=0, local_size=1, device=world.device)
        make = build_optimizer_factory(recipe.optimizer)
        strategy = build_strategy(
            StrategyConfig(parallel, world, task.module, make, dtype, task.blocks(), task.weights)
        )
        strategy.world = _joined(world)
        check_layout(recipe, torch.float32, strategy)
    finally:
        leave()


def _joined(world: World) -> World:
    """The world that the processes are in, whatever the strategy was told."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return World(rank=rank, size=size, local_rank=rank, local_size=size, device=world.device)
