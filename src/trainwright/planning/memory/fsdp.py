"""Memory of `fsdp` (parallel/fsdp/fully_sharded.py; torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and
_fsdp_collectives.py).

A block is gathered into one buffer and copied out of it into its parameters. In the forward pass the buffer stays until
the next block is copied out; in the backward pass the next block's buffer is filled while a block runs, and the buffer
from which a block's gradients are reduced stays until the next block's are reduced. Embedding and head are one unit,
which stays gathered from the begin of the forward pass to the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from trainwright.planning.memory.inventory import Inventory, optimizer_state
from trainwright.planning.memory.strategies import FP32, StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow, most


class ShardedUnit(NamedTuple):
    """Element counts of a unit, padded to equal rows on every rank. ``own``: those of the fullest rank."""

    padded: int
    trained: int
    own: int
    own_trained: int


@lru_cache(maxsize=128)
def units(inventory: Inventory, shards: int) -> tuple[ShardedUnit, ...]:
    """Return embedding and head together, and then every block."""
    sums = [[0, 0] for _ in range(inventory.units - 1)]
    for weight in inventory.weights:
        unit = sums[weight.unit % (inventory.units - 1)]
        own = weight.own(shards)
        unit[0] += own
        unit[1] += own * weight.trainable
    return tuple(ShardedUnit(own * shards, trained * shards, own, trained) for own, trained in sums)


class FsdpMemory(StrategyMemory):
    """Memory of this rank's shards, which are master weights where they are trained, and of gathered weights."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        every = units(self.inventory, self.choice.shards)
        own, trained = sum(unit.own for unit in every), sum(unit.own_trained for unit in every)
        return {
            "parameters": FP32 * trained + self.inventory.width * (own - trained),
            "optimizer state": optimizer_state(self.inventory, self.optimizer, self.choice.shards),
        }

    def flow(self) -> Flow:
        """Return the memory flow of gathered parameters and gradients through a step."""
        choice = self.choice
        offload = choice.offload_parameters and self.on_gpu
        return FsdpFlow(self.inventory, choice.shards, choice.reshard_after_forward, self.on_gpu, offload)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        return FP32 * sum(unit.own_trained for unit in units(self.inventory, self.choice.shards))

    def gradients_on_host(self) -> int:
        """Return the bytes of gradients in the host's memory."""
        return self.step()

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of the shards of offloaded parameters, and of the gradients of those that are trained."""
        for weight in self.inventory.weights if self.choice.offload_parameters else ():
            own = weight.own(self.choice.shards)
            yield own * (FP32 if weight.trainable else self.inventory.width)
            if weight.trainable:
                yield own * FP32


class FsdpFlow(Flow):
    """Memory of gathered parameters and gradients through a step.

    ``reshard``: gathered parameters are freed after the forward pass. ``offload``: reduced gradients go to the host's
    memory and are accumulated there.
    """

    def __init__(self, inventory: Inventory, shards: int, reshard: bool, on_gpu: bool, offload: bool = False) -> None:
        self._units = units(inventory, shards)
        self._width, self._shards = inventory.width, shards
        self._reshard, self._offload = reshard, offload
        self._copies = not on_gpu and shards > 1  # gloo gathers and reduces through a copy
        self._whole = 0  # bytes of gathered parameters
        self._buffer = 0  # left from the last gathering, or filled for the next unit
        self._gradients = 0  # bytes of gradients of full parameters
        self._summed = 0  # bytes of gradients of shards
        self._reducing = 0
        self._first = self._last = True

    @property
    def held(self) -> Allocated:  # type: ignore[override]
        """Memory that is held now."""
        return Allocated(self._gradients + self._summed, self._whole + self._buffer, self._reducing)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last = first, last
        if first:
            self._whole = self._buffer = self._gradients = self._summed = self._reducing = 0

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit`` and return the most memory that was held."""
        if self._reshard and unit > 1:
            self._whole -= self._bytes(unit - 1)
        if unit == len(self._units) or not (self._reshard or self._first):
            return self.held  # already gathered
        size, gathering = self._gathering(unit)
        self._whole += self._bytes(unit)
        self._buffer = size
        return most(gathering, self.held)

    def forward_ended(self) -> None:
        """End the forward passes."""
        self._buffer = 0

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit`` and return the most memory that was held."""
        if not self._reshard or unit == 0:
            return self.held
        highest = self.held
        if unit < len(self._units):  # copied out of its buffer
            self._whole += self._bytes(unit)
            highest = self.held
            self._buffer = 0
        return most(highest, self._prefetch(unit - 1))

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter in the backward pass and return the memory held."""
        if self._reshard or self._first or self._width < FP32:
            self._gradients += self._width * numel
        return self.held

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit`` and return the most memory that was held."""
        if unit == len(self._units):
            return self.held  # with the embedding
        if self._last or self._reshard:
            return self._reduce(unit)
        return self._keep(unit)

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        highest = self.held
        self._reducing = 0
        return highest

    def _bytes(self, unit: int) -> int:
        return self._units[unit].padded * self._width

    def _gathering(self, unit: int) -> tuple[int, Allocated]:
        """Return the bytes of the buffer that ``unit`` is gathered into, and the memory held meanwhile."""
        size = self._bytes(unit) if self._shards > 1 else 0
        copies = size if self._copies else 0
        if self._width < FP32:
            copies += self._units[unit].own_trained * self._width  # frozen ones already have that width
        return size, Allocated(
            self._gradients + self._summed, self._whole + self._buffer + size + copies, self._reducing
        )

    def _prefetch(self, unit: int) -> Allocated:
        if unit == 0:
            return self.held
        size, highest = self._gathering(unit)
        self._buffer += size
        return highest

    def _reduce(self, unit: int) -> Allocated:
        """Reduce a unit's gradients over the ranks, each of which keeps its rows."""
        sizes = self._units[unit]
        self._whole -= self._bytes(unit)
        self._reducing = FP32 * sizes.trained
        highest = self.held
        accumulated = 0 if self._reshard or self._first else FP32  # earlier micro-batches left full gradients
        own = self._width if self._reshard or self._first or self._width < FP32 else 0
        self._gradients -= (own + accumulated) * sizes.trained
        mine = FP32 * sizes.own_trained
        clone = self._reducing if self._copies else 0
        reduced = Allocated(self._gradients + self._summed + mine, self._whole + self._buffer, self._reducing + clone)
        if (self._first or not self._reshard) and not self._offload:
            self._summed += mine
        return most(highest, reduced)

    def _keep(self, unit: int) -> Allocated:
        """Keep a unit's gradients in fp32 until those of later micro-batches are added."""
        if self._width == FP32:
            return self.held
        trained = self._units[unit].trained
        self._gradients += (FP32 if self._first else 0) * trained
        highest = self.held
        self._gradients -= self._width * trained
        return highest
