"""The passes of a step: forward and backward over this rank's share of a global batch; and signs of divergence."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from trainwright.data.stream.batch import copy_to_device
from trainwright.data.stream.stream import GlobalBatch, MicroBatch
from trainwright.engine.out_of_memory import MemoryShortage, catch_shortage, read_peak_memory
from trainwright.engine.policies.base import (
    RankReport,
    StepGradients,
    StepPolicy,
    TrainingContext,
    check_steps,
    handle_wrong_numbers,
)
from trainwright.engine.policies.micro_batch_halving import Halving
from trainwright.engine.policies.replay import Replay
from trainwright.engine.policies.stragglers import own_seconds
from trainwright.engine.task import CollatesAhead, ForwardOnly, LossSum
from trainwright.machine.allocator import ResidentMemory
from trainwright.parallel.strategy import Independent
from trainwright.recipe.schema import OptimizerSection
from trainwright.utils import heartbeat

# AdamW, and Muon with updates scaled to those of AdamW, use up to some 1e-3 for large models and 6e-3 for tiny ones.
_USUAL = "1e-6 to 1e-3"
_FAR_ABOVE = 2e-2
_STEPS = 100
_NORM_GROWS = 100.0


class Divergence:
    """Keep the newest finite losses and gradient norms, and say what they tell about the learning rate."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_STEPS)
        self._norms: deque[float] = deque(maxlen=_STEPS)

    def add(self, gradients: StepGradients) -> None:
        """Add the numbers of a step, if they are finite."""
        if gradients.is_finite:
            self._losses.append(gradients.loss)
            self._norms.append(gradients.norm)

    def describe_advice(self, optimizer: OptimizerSection, rate: float, updates: int) -> str:
        """Return why the learning rate is a likely cause, and what to do; "" if nothing points to it.

        Args:
            rate: of the last update.
            updates: made before these numbers; without any, the learning rate has had no effect yet.
        """
        if updates <= 0 or rate == 0.0:
            return ""
        why = []
        if rate > _FAR_ABOVE:
            why.append(f"{optimizer.name} is usually trained with {_USUAL}")
        if self._losses and self._losses[-1] - (lowest := min(self._losses)) > 1.0 + abs(lowest):
            why.append(f"the loss had grown from {lowest:.4g} to {self._losses[-1]:.4g}")
        elif self._norms and self._norms[-1] > _NORM_GROWS * max(least := min(self._norms), math.ulp(1.0)):
            why.append(f"the gradient norm had grown from {least:.4g} to {self._norms[-1]:.4g}")
        if not why:
            return ""
        clip = ", or set optimizer.max_grad_norm to 1.0" if optimizer.max_grad_norm is None else ""
        return (
            f"the likely cause is optimizer.learning_rate {optimizer.learning_rate:g} ({rate:g} in the last update): "
            f"{' and '.join(why)}; lower it, raise optimizer.warmup_steps{clip}"
        )


_REPORT = len(RankReport._fields)


class ShareSums(NamedTuple):
    """What the passes over a rank's share give beside gradients: float64 on the device, where they may not be done yet.

    ``losses``: summed loss of each micro-batch. ``norm``: of the full gradient over all ranks, a scalar.
    ``statistics``: the task's, of the share.
    """

    losses: torch.Tensor
    norm: torch.Tensor
    statistics: torch.Tensor


@dataclass
class StepPasses:
    """Compute the gradients of global batches.

    Args:
        replay: compares passes of this rank with those of others.
        policies: decide whether a batch is repeated.
        requests: returns for a step whether this rank was asked to stop, whether a checkpoint is due after it, and
            how far its part of the one in the background is.
        rate: returns the learning rate of a step.
    """

    training: TrainingContext
    halving: Halving
    replay: Replay
    policies: Sequence[StepPolicy]
    requests: Callable[[int], tuple[bool, bool, float]]
    rate: Callable[[int], float]
    _divergence: Divergence = field(default_factory=Divergence, init=False)
    _sums: int = field(default=0, init=False)  # number of the task's statistics; 0 before the first step
    _reported: list[float] = field(default_factory=own_seconds, init=False)
    _resident: ResidentMemory = field(default_factory=ResidentMemory, init=False)

    def __post_init__(self) -> None:
        training = self.training
        if training.world.device.type == "cpu" and training.recipe.train.compile is not True:
            for block in training.task.blocks():
                block.register_forward_pre_hook(self._bound_memory, with_kwargs=True)

    def _bound_memory(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bound what the allocator keeps before a block runs, and after its backward pass."""
        self._resident.bound()
        hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(self._after_backward)

    def _after_backward(self, gradient: torch.Tensor) -> None:
        self._resident.bound()

    def gradients(self, step: int, batch: GlobalBatch) -> StepGradients:
        """Return the gradients of a global batch, repeated while a policy asks for it.

        Raises:
            WrongNumbers, RewindRequested: the loss or the norm is not finite.
            TrainingError: memory ran out and nothing can be halved.
        """
        while True:
            gradients = self._compute(step, batch)
            candidates = (policy.again(step, gradients) for policy in self.policies)
            repeated_batch = next((candidate for candidate in candidates if candidate is not None), None)
            if repeated_batch is None:
                break
            batch = repeated_batch
        if not gradients.is_finite:
            self._handle_non_finite(step, gradients)
        self._divergence.add(gradients)
        return gradients

    def _compute(self, step: int, batch: GlobalBatch) -> StepGradients:
        world = self.training.strategy.world
        result = catch_shortage(functools.partial(self.forward_backward, step, batch))
        shortage = result if isinstance(result, MemoryShortage) else None
        if shortage is not None:
            self.halving.after_shortage(step, batch, shortage)
            result = ShareSums(*(torch.zeros(n, dtype=torch.float64, device=world.device) for n in (1, 1, self._sums)))
        assert isinstance(result, ShareSums)
        self._collate_ahead(step)
        stop, save, write_progress = self.requests(step)
        loss = functools.reduce(torch.add, result.losses.unbind())  # in their order
        peak, resident = read_peak_memory(world.device), self._resident.bound()
        values = [stop, peak, shortage is not None, save, step, write_progress, resident, *self._own_seconds()]
        host = torch.tensor(values, dtype=torch.float64)
        row = torch.cat([torch.stack([loss]), copy_to_device(host, world.device), result.statistics[: self._sums]])
        # Everything is read at once: the host waits for the device once a step.
        read = torch.cat([world.gather_rows(row).view(-1), result.norm.view(1), result.losses]).tolist()
        rows = [read[i : i + len(row)] for i in range(0, world.size * len(row), len(row))]
        norm, *losses = read[world.size * len(row) :]
        reports = [RankReport(*row[:_REPORT]) for row in rows]
        check_steps([int(rank.step) for rank in reports])
        gradients = StepGradients(batch, sum(rank.loss for rank in reports) / batch.weight, norm, reports, losses)
        if any(rank.out_of_memory for rank in reports):
            return replace(gradients, shortage=shortage)
        statistics = [row[_REPORT:] for row in rows]
        if len(result.statistics) != self._sums:  # the first step, which tells how many the task has
            statistics = world.gather_rows(result.statistics).tolist()
            self._sums = len(result.statistics)
        return replace(gradients, statistics=[sum(column) for column in zip(*statistics, strict=True)])

    def _collate_ahead(self, step: int) -> None:
        """Let the task collate this rank's first micro-batch of the next step: a GPU still computes this one.

        Otherwise the GPU, which has nothing to do between two steps, would wait for it.
        """
        task, world = self.training.task, self.training.world
        if isinstance(task, CollatesAhead) and step < len(task.stream):
            task.collate_ahead(task.stream.global_batch(step).select_for_rank(world.rank, world.size)[0])

    def _own_seconds(self) -> list[float]:
        """Return what ``own_seconds`` has counted since the last report."""
        before, self._reported = self._reported, own_seconds()
        return [now - then for now, then in zip(self._reported, before, strict=True)]

    def forward_backward(self, step: int, batch: GlobalBatch) -> ShareSums:
        """Add the gradients of this rank's share of a global batch to the model; the host waits for nothing."""
        task, strategy, progress = self.training.task, self.training.strategy, self.training.progress
        world = strategy.world
        micro_batches = batch.select_for_rank(world.rank, world.size)
        task.before_passes(ForwardOnly(strategy), batch, validation=False)
        totals, statistics = [], []
        checked = self.replay.is_due(step)
        if checked:
            self._repeat(step, self.replay.select_neighbor_batch(batch), own=False)
        for position, micro in enumerate(micro_batches, 1):
            part = self._forward(step, position, micro, own=True if checked and position == 1 else None)
            assert part.weight == micro.weight or not micro.weight, (
                f"the loss counts {part.weight} target weight, the stream {micro.weight}"
            )
            # A zero-weight pass contributes no gradient; it runs so that collectives match.
            total = part.total if micro.weight else part.total * 0.0
            heartbeat.begin_phase("backward", step, position)
            strategy.backward(total * (progress.loss_scale / batch.weight), last=position == len(micro_batches))
            totals.append(total.detach())
            if part.statistics is not None:
                statistics.append(part.statistics * float(micro.weight > 0))
        heartbeat.begin_phase("gradient norm", step)
        norm = strategy.gradient_norm() / progress.loss_scale
        sums = torch.stack(statistics).sum(0) if statistics else torch.empty(0, device=world.device)
        return ShareSums(torch.stack(totals).double(), norm, sums.double())

    def repeat(self, step: int, batch: GlobalBatch) -> None:
        """Record this rank's passes that ``Replay`` compares once more; the gradients of the step are lost."""
        share = batch.select_for_rank(self.training.world.rank, self.training.world.size)
        self._repeat(step, self.replay.select_neighbor_batch(batch), own=False)
        self._repeat(step, share[0], own=True)

    def _repeat(self, step: int, micro: MicroBatch, *, own: bool) -> None:
        """Record the pass of a micro-batch that contributes nothing."""
        strategy = self.training.strategy
        part = self._forward(step, 0, micro, own)
        if not isinstance(strategy, Independent):  # a backward pass ends the use of sharded weights
            strategy.backward(part.total * 0.0, last=False)

    def _forward(self, step: int, position: int, micro: MicroBatch, own: bool | None) -> LossSum:
        """Return the losses of a micro-batch. ``own``: record it as this rank's or another's; None: do not."""
        task, world, seed = self.training.task, self.training.world, self.training.recipe.train.seed
        # Seeded by micro-batch, not by rank: dropout is the same on any number of processes.
        _seed_dropout(world.device, seed, step, micro.index)
        heartbeat.begin_phase("forward", step, position)
        if own is None:
            return task.loss(self.training.strategy.module, micro, world.device)
        with self.replay.record_pass(own=own) as losses:
            part = task.loss(self.training.strategy.module, micro, world.device)
            losses.append(part.total)
        return part

    def _handle_non_finite(self, step: int, gradients: StepGradients) -> None:
        """Do what faults.on_non_finite says before the numbers reach the weights, naming the examples."""
        task, strategy = self.training.task, self.training.strategy
        world, batch = strategy.world, gradients.batch
        share = batch.select_for_rank(world.rank, world.size)
        local_examples = [
            e for m, value in zip(share, gradients.losses, strict=True) if not math.isfinite(value) for e in m.examples
        ]
        by_rank = world.gather(local_examples)
        bad = sorted({example for of_rank in by_rank for example in of_rank})
        examples = bad or sorted(example for micro in batch.micro_batches for example in micro.examples)
        descriptions = "; ".join(f"{index}: {task.describe_example(index)}" for index in examples[:4])
        detail = (
            f"loss {gradients.loss} and gradient norm {gradients.norm} at step {step}; the weights are those of step "
            f"{step - 1}. Examples in the batch: {', '.join(map(str, examples))} ({descriptions})"
        )
        progress, optimizer = self.training.progress, self.training.recipe.optimizer
        updates = step - 1 - len(progress.left_out) - progress.non_finite
        if advice := self._divergence.describe_advice(optimizer, self.rate(step - 1) if step > 1 else 0.0, updates):
            detail = f"{detail}; {advice}"
        rank = next((rank for rank, of_rank in enumerate(by_rank) if of_rank), world.rank)
        action = self.training.recipe.faults.on_non_finite
        handle_wrong_numbers(self.training, action, "non_finite", rank, detail, step)


def _seed_dropout(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed the generators that a pass on ``device`` uses, from the micro-batch.

    torch.manual_seed is not used: it formats the stack of its caller for every kind of device, a millisecond a call.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}".encode()).digest()
    dropout_seed = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(dropout_seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(dropout_seed)
