"""Export the trained model at the end of a run, in the format that other programs read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from trainwright.engine.checkpoints.read_back import check_export, gathered
from trainwright.engine.out_of_memory import MemoryShortage, attempt
from trainwright.engine.task import Task
from trainwright.errors import EXIT_TRAINING, TrainingError, TrainwrightError, error_of
from trainwright.machine.allocator import return_freed_memory
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
    parameters = gathered(strategy, different) if adapter else strategy.parameters()
    tensors = _in_turns(parameters, world, may_stop=saved == step)
    failure: tuple[int, str] | None = None  # exit code and message, the same on every rank
    if world.is_main:
        try:
            outcome = attempt(lambda: task.export(tensors, final))
        except OSError as error:
            reason = f"{final} could not be written: {error.strerror or error}"
            failure = (
                EXIT_TRAINING,
                f"{reason}; {_describe_saved(step, saved)}: free disk space, then --resume this run",
            )
        except TrainwrightError as error:
            failure = error.exit_code, str(error)
        else:
            if isinstance(outcome, MemoryShortage):
                failure = (
                    EXIT_TRAINING,
                    (
                        f"memory ran out while {final} was written: {outcome.detail}; {_describe_saved(step, saved)}: "
                        "--resume this run with more memory"
                    ),
                )
    for _ in tensors:  # every rank takes part in gathering
        pass
    failure = world.broadcast(failure)
    if failure is not None:
        raise error_of(*failure)
    try:
        return check_export(task, strategy, final, different)
    except TrainingError as error:
        raise TrainingError(f"{error}; {_describe_saved(step, saved)}") from None


def _describe_saved(step: int, saved: int | None) -> str:
    """Return what can be resumed of a run whose last step is done."""
    if saved == step:
        return "the training is done and checkpointed"
    if saved is None:
        return "the training is done, but no checkpoint could be written, so it would start again from the beginning"
    return f"the training is done, but its newest checkpoint is of step {saved}"


def _in_turns(tensors: Iterable[T], world: World, may_stop: bool) -> Iterator[T]:
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
