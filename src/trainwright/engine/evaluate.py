"""Evaluation and samples during training, shared among all ranks under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from trainwright.engine.events import EventLog
from trainwright.engine.out_of_memory import MemoryShortage, catch_shortage
from trainwright.engine.task import ForwardOnly, Measured, Task
from trainwright.parallel.strategy import Independent, Strategy
from trainwright.parallel.world import StopRequested
from trainwright.utils import heartbeat


def evaluate(
    task: Task,
    strategy: Strategy,
    again: Callable[[MemoryShortage | None], bool],
    report: Callable[[str], None],
    events: EventLog,
    step: int,
    main_set: str | None = None,
) -> Measured:
    """Return metrics over the validation split, each example counted once, and of the answers that the recipe asks
    for.

    Of several validation sets, each metric is that of ``main_set``, or of all together, and ``NAME/METRIC`` that of
    each set.

    Args:
        again: called on every rank with its out-of-memory error, if any; returns whether all ranks start over.
        report: as for ``generate``.
        events: is told what is done and how much of it.
        step: after which this happens, for ``events``.

    Raises:
        StopRequested: on every rank, if any of them was asked to stop; partial results are discarded.
    """
    while True:
        sums = _compute_statistics(task, strategy, events)
        if not again(sums if isinstance(sums, MemoryShortage) else None):
            break
    assert not isinstance(sums, MemoryShortage)
    metrics = _compute_metrics(task, strategy, sums, main_set)
    if task.answers:
        with strategy.full_parameters() as (module, in_step):
            if in_step is not None:
                report(in_step)
            events.announce("answering rows of the validation split", step)
            answer_measurements = task.answer_metrics(module, strategy.world, together=in_step is not None)
        return replace(answer_measurements, metrics={**metrics, **answer_measurements.metrics})
    return Measured(metrics)


def _compute_metrics(
    task: Task, strategy: Strategy, sums: dict[str, torch.Tensor], main_set: str | None
) -> Mapping[str, float]:
    """Return the metrics of the sums of each set over all ranks."""
    size = len(next(iter(sums.values())))
    flat = strategy.world.sum(torch.cat([*sums.values()]).tolist())
    parts = {name: flat[index * size : (index + 1) * size] for index, name in enumerate(sums)}
    together = [sum(column) for column in zip(*parts.values(), strict=True)]
    set_metrics = {
        f"{name}/{metric}": value
        for name, part in parts.items()
        if name
        for metric, value in task.metrics(part).items()
    }
    main = together if main_set is None else parts.get(main_set, together)  # a simulation may end before it
    return {**task.metrics(main), **set_metrics}


def _compute_statistics(task: Task, strategy: Strategy, events: EventLog) -> dict[str, torch.Tensor] | MemoryShortage:
    """Return this rank's part of the sums over each set of the validation split, or its out-of-memory error."""
    assert task.validation is not None
    world, module = strategy.world, strategy.module
    sums: dict[str, torch.Tensor] = {}
    module.eval()
    try:
        for step in range(len(task.validation)):
            parts = catch_shortage(lambda step=step: _compute_batch_statistics(task, strategy, step))  # type: ignore[misc]
            if isinstance(parts, MemoryShortage) and not isinstance(strategy, Independent):
                return parts  # the other ranks wait for this one in their passes
            stop = world.stop_requested is not None and world.stop_requested()
            ranks = world.gather_floats([float(stop), float(isinstance(parts, MemoryShortage))])
            if any(stopped for stopped, _ in ranks):
                raise StopRequested
            if isinstance(parts, MemoryShortage):
                return parts
            name = task.validation.set_of(step)
            for part in parts:
                sums[name] = sums[name] + part if name in sums else part
            events.progress(step + 1, len(task.validation))
            heartbeat.note_progress()
            if any(short for _, short in ranks):
                break  # another rank has to start over, so all do
    finally:
        module.train()
    return sums


@torch.no_grad()
def _compute_batch_statistics(task: Task, strategy: Strategy, step: int) -> list[torch.Tensor]:
    """Return this rank's sums over each of its micro-batches of one batch of the validation split."""
    assert task.validation is not None
    world, batch = strategy.world, task.validation.global_batch(step)
    task.before_passes(ForwardOnly(strategy), batch, validation=True)
    mine = batch.select_for_rank(world.rank, world.size)
    return [task.statistics(strategy.module, micro, world.device).double() for micro in mine]


def generate(
    task: Task, strategy: Strategy, report: Callable[[str], None], events: EventLog, available_memory: int | None = None
) -> list[tuple[str, str]]:
    """Return ``(prompt, text)`` for every prompt of the task; the ranks share the prompts, and all get all texts.

    Args:
        report: called with the reason if the ranks generate together, which is slower.
        events: is told how many prompts are done.
        available_memory: see ``Strategy.full_parameters``.

    Raises:
        StopRequested: as ``evaluate``.
    """
    world, prompts = strategy.world, task.prompts
    if not prompts:
        return []
    with strategy.full_parameters(available_memory) as (module, in_step):
        if in_step is not None:
            report(in_step)
        # When generating together, all ranks answer the same prompts so that they run the module equally often.
        mine, every = (0, 1) if in_step is not None else (world.rank, world.size)
        texts = {}
        for first in range(0, len(prompts), every):
            if (index := first + mine) < len(prompts):
                texts[index] = task.generate(module, prompts[index])
            world.check_stop()
            events.progress(min(first + every, len(prompts)), len(prompts))
            heartbeat.note_progress()
    for part in world.gather(texts):
        texts.update(part)
    return [(prompt, texts[index]) for index, prompt in enumerate(prompts)]
