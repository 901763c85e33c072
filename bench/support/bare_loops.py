"""Training without an engine: what one writes by hand in torch, for one process, for DDP and for FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainwright.data.stream.batch import Batch, collate
from trainwright.engine.optimizer import Schedule
from trainwright.parallel.world import World
from trainwright.recipe.schema import RecipeSchema


def bare_loop(recipe: RecipeSchema, task: Any, world: World) -> BareLoop:
    """The hand-written loop for the recipe's strategy."""
    if recipe.parallel.strategy == "single":
        return LowPrecisionLoop(recipe, task, world, task.module)
    if recipe.parallel.strategy == "ddp":
        return BareLoop(recipe, task, world, DistributedDataParallel(task.module))
    for block in task.blocks():
        fully_shard(block)
    fully_shard(task.module)
    return BareLoop(recipe, task, world, task.module)


class BareLoop:
    """fp32, with gradients averaged over the ranks by the wrapper around the model."""

    def __init__(self, recipe: RecipeSchema, task: Any, world: World, module: nn.Module) -> None:
        self.world = world
        self.module = module
        self.steps = _batches(task, recipe, world)
        self.schedule = Schedule(recipe.optimizer, len(self.steps))
        self.settings = recipe.optimizer
        self.weights = self.make_weights()
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.weights if p.dim() >= 2], "weight_decay": self.settings.weight_decay},
                {"params": [p for p in self.weights if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            eps=self.settings.eps,
            fused=True,
        )
        self.module.train()

    def make_weights(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def step(self, number: int) -> float:
        """Optimizer step ``number``, counted from 1; its mean loss over all ranks."""
        batches, targets = self.steps[number - 1]
        total = 0.0
        for batch in batches:
            loss = self.module(batch) * (batch.weight > 0) / targets
            (loss * self.world.size).backward()
            total += loss.item()
        self.update(number)
        if self.world.size > 1:
            everyone = torch.tensor(total)
            dist.all_reduce(everyone)
            total = everyone.item()
        return total

    def update(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(number)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class LowPrecisionLoop(BareLoop):
    """bf16 weights to compute with, fp32 masters to update."""

    def make_weights(self) -> list[nn.Parameter]:
        masters = [nn.Parameter(p.detach().clone()) for p in self.module.parameters()]
        self.module.to(torch.bfloat16)
        self.working = list(self.module.parameters())
        return masters

    def update(self, number: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.working, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(number)
        for master, weight in zip(self.weights, self.working, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.weights, self.working, strict=True):
                weight.copy_(master)
                master.grad = None


def _batches(task: Any, recipe: RecipeSchema, world: World) -> list[tuple[list[Batch], float]]:
    """This rank's micro-batches of every step as tensors, and the targets of the whole step."""
    assert recipe.train.max_steps is not None
    steps = [task.stream.global_batch(step) for step in range(recipe.train.max_steps)]
    return [
        (
            [
                collate(task.stream.dataset, micro, packed=True, pad_token_id=0)
                for micro in step.select_for_rank(world.rank, world.size)
            ],
            step.weight,
        )
        for step in steps
    ]
