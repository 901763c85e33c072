"""Read a saved model or adapter back and compare it with the parameters of every rank.

A faulty one would go unnoticed until it is used: if it was gathered from one shard, is empty, or loads as another
model, it still has the right names and settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError
from trainwright.engine.task import Task
from trainwright.errors import RequestError, TrainingError
from trainwright.parallel.layout import Shard
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import World


def gathered(strategy: Strategy, different: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full trained parameters; add to ``different`` the names of those that do not match this rank's part.

    Every rank must iterate.
    """
    shards = strategy.state()
    for name, tensor in strategy.parameters(frozen=False):
        shard = shards.get(f"model.{name}")
        if shard is not None and not torch.equal(tensor[_window(shard)].to(shard.local.device), shard.local):
            different.append(name)
        yield name, tensor


def check_checkpoint(task: Task, world: World, path: Path, shards: Mapping[str, Shard]) -> None:
    """Compare the checkpoint in ``path`` with the state it was made from; remove it if they differ.

    Raises:
        CheckpointError: on every rank, if any of them finds a difference.
    """
    problem, adapter = None, {}
    try:
        with Checkpoint.open(path, verify=world.is_main).reader() as read:
            for name, shard in shards.items():
                if name.startswith("model."):
                    adapter[name] = read(name, shard)
                    if not torch.equal(adapter[name], shard.local.cpu()):
                        problem = f"{name} differs"
    except (OSError, CheckpointError, RequestError) as error:
        problem = str(error)
    outcomes = world.gather((problem, task.adds_nothing(adapter)))
    problem = next((reason for reason, _ in outcomes if reason is not None), None)
    if problem is None and all(nothing for _, nothing in outcomes):
        problem = "the adapter in it adds nothing to the model"
    if problem is not None:
        if world.is_main:
            shutil.rmtree(path, ignore_errors=True)
        raise CheckpointError(f"checkpoint in {path} was written, but reads back differently: {problem}")


def check_export(
    task: Task, strategy: Strategy, final: Path, different: list[str], available_memory: int | None = None
) -> str | None:
    """Compare the model exported to ``final`` with the ranks' parameters and its logits with the trained model's.

    Return why this rank did not compare it, or None.

    Args:
        different: the names that ``gathered`` found.
        available_memory: see ``Strategy.full_parameters``; for an adapter only, as full models are not gathered.

    Raises:
        TrainingError: on every rank, if any of them finds a difference; ``final`` is then renamed.
    """
    world, problem, note = strategy.world, None, None
    adapter = task.base is not None
    if different:
        problem = f"the gathered parameters differ from those of rank {world.rank}: {', '.join(sorted(different)[:5])}"
    with strategy.full_parameters(available_memory if adapter else 0) as (module, in_step):
        try:
            directory = final if adapter or world.is_main else None
            note = task.read_back(module, directory, all_parameters=in_step is None)
        except (TrainingError, OSError) as error:
            problem = problem or str(error)
    problem = next((reason for reason in world.gather(problem) if reason is not None), None)
    if problem is not None:
        aside = final.with_name(f"{final.name}-failed-check")
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        raise TrainingError(f"{problem}, and the exported files are in {aside}")
    return note


def _window(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.local.shape, strict=True))
