"""What every process of a run executes: from the run directory's recipe to a finished engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainwright.engine.checkpoint import Checkpoint, Checkpoints
from trainwright.engine.events import EventLog, Observer
from trainwright.engine.optimizer import optimizer_factory
from trainwright.engine.schedule import Schedule
from trainwright.engine.task import Task
from trainwright.engine.trainer import Trainer
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, MachineError
from trainwright.machine.detect import detect
from trainwright.models.compilation import compile_blocks
from trainwright.parallel.build import build_strategy
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import Recipe
from trainwright.tasks.registry import build_task

_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}


def run_worker(
    run: Path,
    *,
    cache: Path,
    resume: bool,
    reasons: Sequence[str],
    observers: Callable[[], Sequence[Observer]],
    stop_requested: Callable[[], bool],
) -> int:
    """Train this process's share of the run in directory ``run``, whose recipe is resolved.

    Args:
        observers: called on rank 0 only, for what shall see the events.

    Returns:
        The exit code: finished, or stopped on a signal after a checkpoint.
    """
    recipe_text = (run / "recipe.yaml").read_text()
    recipe = load_recipe(run / "recipe.yaml")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    # Before any process group: reading and preparing may take long, and nobody waits in a collective meanwhile.
    task = build_task(recipe, cache)
    world = join(detect().device)
    try:
        _check_world(recipe, world)
        if recipe.train.compile is True:
            compile_blocks(task.blocks())
        dtype = _DTYPES[recipe.train.mixed_precision]
        strategy = build_strategy(
            recipe.parallel.strategy, world, task.module, optimizer_factory(recipe.optimizer), dtype
        )
        events = EventLog(run / "events.jsonl", observers()) if world.is_main else EventLog(None)
        checkpoints = Checkpoints(
            run / "checkpoints",
            keep_last=recipe.checkpoint.keep_last,
            keep_best=recipe.checkpoint.keep_best,
        )
        max_steps = len(task.stream)
        trainer = Trainer(
            recipe=recipe,
            recipe_text=recipe_text,
            task=task,
            strategy=strategy,
            schedule=Schedule(recipe.optimizer, max_steps),
            checkpoints=checkpoints,
            events=events,
            max_steps=max_steps,
            stop_requested=stop_requested,
        )
        checkpoint = _latest(checkpoints, world, events) if resume else None
        if checkpoint is not None:
            trainer.resume(checkpoint)
        events.emit("start", **_start(recipe, task, strategy, trainer, run, reasons))
        finished = trainer.run(run / "final")
        events.close()
        return EXIT_FINISHED if finished else EXIT_STOPPED
    finally:
        leave()


def _check_world(recipe: Recipe, world: World) -> None:
    """What was asked is what runs."""
    if world.size != recipe.parallel.num_processes:
        raise MachineError(
            f"parallel.num_processes: the recipe asks for {recipe.parallel.num_processes} processes, and "
            f"{world.size} were started; start it through `trainwright train` or with that many"
        )


def _latest(checkpoints: Checkpoints, world: World, events: EventLog) -> Checkpoint | None:
    """The newest checkpoint that verifies; rank 0 reads every byte and the others take its word."""
    chosen: str | None = None
    if world.is_main:
        found, refused = checkpoints.latest()
        for reason in refused:
            events.emit("fault", kind="checkpoint", rank=0, detail=reason, action="use the one before it")
        chosen = None if found is None else str(found.path)
    chosen = world.broadcast(chosen)
    return None if chosen is None else Checkpoint.open(Path(chosen), verify=False)


def _start(
    recipe: Recipe, task: Task, strategy: Strategy, trainer: Trainer, run: Path, reasons: Sequence[str]
) -> dict[str, object]:
    module, world = strategy.module, strategy.world
    first = task.stream.global_batch(0)
    return {
        "task": recipe.task,
        "world_size": world.size,
        "strategy": strategy.name,
        "mixed_precision": recipe.train.mixed_precision,
        "device": _device_name(world),
        "micro_batch_size": recipe.train.micro_batch_size,
        "gradient_accumulation_steps": len(first.for_rank(0, world.size)),
        "global_batch_size": recipe.train.global_batch_size,
        "parameters": sum(p.numel() for p in module.parameters()),
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "resumed_from": trainer.progress.step or None,
        "max_steps": trainer.max_steps,
        "threads": torch.get_num_threads(),
        "run_directory": str(run),
        "reasons": list(reasons),
        **task.describe(),
    }


def _device_name(world: World) -> str:
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return detect().cpu_name
