"""What each of several processes does to show that texts are the same however the weights come to every rank."""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from tests.support.strategies import PROMPTS
from tests.support.training import built
from trainwright.engine.evaluate import generate
from trainwright.engine.events import EventLog
from trainwright.engine.task import Task
from trainwright.parallel.strategy import Strategy
from trainwright.parallel.world import join, leave


def same_texts_without_room(cases: list[list[str]]) -> None:
    """Every case's texts, with room for a whole copy and without, before a step and after; and the same steps."""
    world, events = join("cpu"), EventLog(None)
    for overrides in cases:
        print(overrides, file=sys.stderr)
        (_, task, strategy), (_, _, other) = (built(world, [*PROMPTS, *overrides]) for _ in range(2))
        said = False
        for _ in range(6):  # until it has something to say
            for _ in range(4):
                assert step(task, strategy) == step(task, other)
            reasons: list[str] = []
            whole = generate(task, strategy, reasons.append, events)
            said = said or any(text for _, text in whole)
            assert not reasons and len(whole) == 3
            assert generate(task, strategy, reasons.append, events, available_memory=0) == whole
            (reason,) = reasons
            assert "the full weights need 0." in reason and "has only 0.0 MiB" in reason, reason
            generate(task, other, reasons.append, events)
            assert step(task, strategy) == step(task, other), "what was gathered for texts has changed the training"
        assert said, "all texts were empty"
        holds_little_between_passes(strategy)
    leave()


def step(task: Task, strategy: Strategy) -> float:
    world = strategy.world
    strategy.module.train()
    share = task.stream.global_batch(0).select_for_rank(world.rank, world.size)
    for position, micro in enumerate(share, 1):
        torch.manual_seed(micro.index)
        strategy.backward(task.loss(strategy.module, micro, world.device).total / 100, last=position == len(share))
    norm = float(strategy.gradient_norm())
    strategy.step(1e-3, 1.0)
    return norm


def holds_little_between_passes(strategy: Strategy) -> None:
    """Where there is no room, a block is whole while it runs only."""
    with strategy.full_parameters(0) as (module, reason), module.open_for_generation() as model:
        assert reason is not None
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.long, device=strategy.world.device), use_cache=False)
            for parameter in model.model.layers.parameters():
                freed = isinstance(parameter, DTensor) or not parameter.numel() or parameter.ds_persist
                assert freed, "a block is whole after its pass"
