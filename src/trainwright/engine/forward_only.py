"""Forward-only passes over micro-batches of a stream, shared among all ranks under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainwright.data.stream.stream import GlobalBatch, MicroBatch
from trainwright.engine.out_of_memory import MemoryShortage, attempt
from trainwright.parallel.strategy import Independent, Strategy
from trainwright.parallel.world import World
from trainwright.utils import heartbeat


class ForwardOnly:
    """Runs a distributed model without gradients, for tasks that need its outputs outside of the loss."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def world(self) -> World:
        """Return the ranks that the model is distributed over."""
        return self._strategy.world

    @property
    def repeatable(self) -> bool:
        """Return whether passes that ran out of memory can be repeated: no rank waits for another within them."""
        return isinstance(self._strategy, Independent)

    def __call__(self, batches: Iterable[GlobalBatch], visit: Callable[[nn.Module, MicroBatch], None]) -> None:
        """Call ``visit`` with the model, in evaluation mode, and each of this rank's micro-batches.

        Every rank must call. For a micro-batch of weight 0, ``visit`` runs a zero-weight pass so that collectives
        match, and ignores the result.

        Raises:
            torch.OutOfMemoryError: memory ran out on some rank; raised on all ranks at once unless they wait for each
                other in the passes themselves.
        """
        outcome = attempt(lambda: self._passes(batches, visit))
        short = isinstance(outcome, MemoryShortage)
        if self.repeatable:
            short = any(flag for (flag,) in self.world.gather_floats([float(short)]))
        if short:
            raise torch.OutOfMemoryError(
                outcome.detail if isinstance(outcome, MemoryShortage) else "out of memory on another rank"
            )

    def _passes(self, batches: Iterable[GlobalBatch], visit: Callable[[nn.Module, MicroBatch], None]) -> None:
        world, module = self.world, self._strategy.module
        training = module.training
        module.eval()
        try:
            with torch.no_grad():
                for batch in batches:
                    for micro in batch.for_rank(world.rank, world.size):
                        visit(module, micro)
                        heartbeat.progress()
        finally:
            module.train(training)
