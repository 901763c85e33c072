"""Export the trained model at the end of a run, in the format that other programs read, and read it back.

A faulty one would go unnoticed until it is used: if it was gathered from one shard, is empty, or loads as another
model, it still has the right names and settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError
from trainwright.engine.out_of_memory import MemoryShortage, catch_shortage
from trainwright.engine.task import Task
from trainwright.errors import EXIT_TRAINING, RequestError, TrainingError, TrainwrightError, build_error
from trainwright.machine.allocator import return_freed_memory
from trainwright.parallel.layout import Shard
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import World

T = TypeVar("T")


def export(task: Task, strategy: Strategy, final: Path, step: int, saved: int | None) -> str | None:
    """Write the model to ``final``, completely or not at all. Every rank must call this.

    A stop request interrupts it if it can be repeated. Return why rank 0 did not compare it with the trained model, or
    None.

    Args:
        step: the last step.
        saved: the step of the newest checkpoint.

    Raises:
        TrainingError: it could not be written, or reading it back gives other values.
        StopRequested: on every rank.
    """
    world = strategy.world
    return_freed_memory()  # of the steps, so that the copies of the model made below do not raise the peak
    different: list[str] = []
    adapter = task.base is not None
    parameters = gather_parameters(strategy, different) if adapter else strategy.parameters()
    tensors = _iterate_in_turns(parameters, world, may_stop=saved == step)
    saved_state = _describe_saved(step, saved)
    failure: tuple[int, str] | None = None  # exit code and message, the same on every rank
    if world.is_main:
        try:
            outcome = catch_shortage(lambda: task.export(tensors, final))
        except OSError as error:
            reason = f"{final} could not be written: {error.strerror or error}"
            failure = EXIT_TRAINING, f"{reason}; {saved_state}: free disk space, then --resume this run"
        except TrainwrightError as error:
            failure = error.exit_code, str(error)
        else:
            if isinstance(outcome, MemoryShortage):
                reason = f"memory ran out while {final} was written: {outcome.detail}"
                failure = EXIT_TRAINING, f"{reason}; {saved_state}: --resume this run with more memory"
    for _ in tensors:  # every rank takes part in gathering
        pass
    failure = world.broadcast(failure)
    if failure is not None:
        raise build_error(*failure)
    try:
        return check_export(task, strategy, final, different)
    except TrainingError as error:
        raise TrainingError(f"{error}; {saved_state}") from None


def _describe_saved(step: int, saved: int | None) -> str:
    """Return what can be resumed of a run whose last step is done."""
    if saved == step:
        return "the training is done and checkpointed"
    if saved is None:
        return "the training is done, but no checkpoint could be written, so it would start again from the beginning"
    return f"the training is done, but its newest checkpoint is of step {saved}"


def _iterate_in_turns(tensors: Iterable[T], world: World, may_stop: bool) -> Iterator[T]:
    """Yield tensors that all ranks gather together, when rank 0 has written the one before.

    The others wait for it between collectives: those of devices have the run's timeout, which a slow disk exceeds.
    """
    gathering = iter(tensors)
    while True:
        world.barrier()
        if may_stop:
            world.check_stop()
        try:
            tensor = next(gathering)
        except StopIteration:
            return
        yield tensor


def gather_parameters(strategy: Strategy, different: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full trained parameters; add to ``different`` the names of those that do not match this rank's part.

    Every rank must iterate.
    """
    shards = strategy.state()
    for name, tensor in strategy.parameters(frozen=False):
        shard = shards.get(f"model.{name}")
        if shard is not None:
            edges = zip(shard.offset, shard.local.shape, strict=True)
            window = tensor[tuple(slice(begin, begin + size) for begin, size in edges)]
            if not torch.equal(window.to(shard.local.device), shard.local):
                different.append(name)
        yield name, tensor


def check_checkpoint(task: Task, world: World, path: Path, shards: Mapping[str, Shard]) -> None:
    """Compare the checkpoint in ``path`` with the state it was made from; remove it if they differ.

    Raises:
        CheckpointError: on every rank, if any of them finds a difference.
    """
    problem, adapter = None, {}
    try:
        with Checkpoint.open(path, verify=world.is_main).open_reader() as read:
            for name, shard in shards.items():
                if name.startswith("model."):
                    adapter[name] = read(name, shard)
                    if not torch.equal(adapter[name], shard.local.cpu()):
                        problem = f"{name} differs"
    except (OSError, CheckpointError, RequestError) as error:
        problem = str(error)
    outcomes = world.gather((problem, task.adds_nothing(adapter)))
    problem = next((reason for reason, _ in outcomes if reason is not None), None)
    if problem is None and all(is_zero for _, is_zero in outcomes):
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
        different: the names that ``gather_parameters`` found.
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
