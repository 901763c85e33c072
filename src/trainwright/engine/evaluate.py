"""Evaluation and samples while training, shared out over all ranks under any strategy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.engine.memory import Shortage, attempt
from trainwright.engine.task import Task
from trainwright.parallel.strategy import Strategy


def evaluate(
    task: Task, strategy: Strategy, again: Callable[[Shortage | None], bool], tell: Callable[[str], None]
) -> dict[str, float]:
    """Metrics over the validation split, each example counted once, and of the answers that the recipe wants.

    Args:
        again: told on every rank how memory ran out there, if it did; says whether all begin again.
        tell: as for ``generate``.
    """
    while True:
        sums = attempt(lambda: _statistics(task, strategy))
        if not again(sums if isinstance(sums, Shortage) else None):
            break
    assert not isinstance(sums, Shortage)
    return task.metrics(strategy.world.sum(sums)) | task.answer_metrics(strategy, tell)


def _statistics(task: Task, strategy: Strategy) -> list[float]:
    """This rank's part of the sums over the validation split."""
    assert task.validation is not None
    world, module = strategy.world, strategy.module
    sums: torch.Tensor | None = None
    module.eval()
    with torch.no_grad():
        for step in range(len(task.validation)):
            batch = task.validation.global_batch(step)
            task.before_passes(strategy, batch, validation=True)
            for micro in batch.for_rank(world.rank, world.size):
                part = task.statistics(module, micro, world.device).double()
                sums = part if sums is None else sums + part
    module.train()
    assert sums is not None
    return sums.tolist()


def generate(
    task: Task, strategy: Strategy, tell: Callable[[str], None], room: int | None = None
) -> list[tuple[str, str]]:
    """``(prompt, text)`` for every prompt of the task; the ranks share the prompts, and all get all texts.

    Args:
        tell: gets the reason where the ranks generate in step, which is slower.
        room: see ``Strategy.whole``.
    """
    world, prompts = strategy.world, task.prompts
    if not prompts:
        return []
    with strategy.whole(room) as (module, in_step):
        if in_step is not None:
            tell(in_step)
        # In step, ranks run the module equally often by answering the same.
        mine = range(len(prompts)) if in_step is not None else range(world.rank, len(prompts), world.size)
        texts = {index: task.generate(module, prompts[index]) for index in mine}
    for part in world.gather(texts):
        texts.update(part)
    return [(prompt, texts[index]) for index, prompt in enumerate(prompts)]
