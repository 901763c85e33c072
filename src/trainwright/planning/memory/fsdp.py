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

from trainwright.parallel.constants import step_elements
from trainwright.planning.memory.inventory import Inventory, sum_optimizer_state
from trainwright.planning.memory.strategies import FP32, StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow, choose_largest


class ShardedUnit(NamedTuple):
    """Element counts of a unit, padded to equal rows on every rank. ``local``: those of the fullest rank."""

    padded: int
    trained: int
    local: int
    local_trained: int


@lru_cache(maxsize=128)
def build_units(inventory: Inventory, shards: int) -> tuple[ShardedUnit, ...]:
    """Return embedding and head together, and then every block."""
    sums = [[0, 0] for _ in range(inventory.units - 1)]
    for weight in inventory.weights:
        unit = sums[weight.unit % (inventory.units - 1)]
        local = weight.local(shards)
        unit[0] += local
        unit[1] += local * weight.trainable
    return tuple(
        ShardedUnit(local * shards, trained_elements * shards, local, trained_elements)
        for local, trained_elements in sums
    )


class FsdpMemory(StrategyMemory):
    """Memory of this rank's shards, which are master weights where they are trained (or bf16 without any), and of
    gathered weights.
    """

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        every = build_units(self.inventory, self.choice.shards)
        local, trained_elements = sum(unit.local for unit in every), sum(unit.local_trained for unit in every)
        return {
            "parameters": (FP32 if self._masters else self.inventory.width) * trained_elements
            + self.inventory.width * (local - trained_elements),
            "optimizer state": sum_optimizer_state(self.inventory, self.optimizer, self.choice.shards),
        }

    def flow(self) -> Flow:
        """Return the memory flow of gathered parameters and gradients through a step."""
        choice = self.choice
        offload = choice.offload_parameters and self.on_gpu
        reshard = choice.reshard_after_forward
        return FsdpFlow(self.inventory, choice.shards, reshard, self.on_gpu, offload, masters=self._masters)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        trained_elements = sum(unit.local_trained for unit in build_units(self.inventory, self.choice.shards))
        if self._masters:
            return FP32 * trained_elements
        largest = max((weight.local(self.choice.shards) for weight in self.inventory.trainable), default=0)
        part = max(largest, min(trained_elements, step_elements(self.on_gpu)))
        if self.choice.reshard_after_forward and self.choice.gradient_accumulation_steps > 1:
            return FP32 * (trained_elements + part)
        return self.inventory.width * trained_elements + 2 * FP32 * part

    def gathered(self) -> int:
        """Return the bytes of all gathered units, and of the buffer that the last one is copied out of."""
        sizes = [unit.padded * self.inventory.width for unit in build_units(self.inventory, self.choice.shards)]
        return sum(sizes) + sizes[-1]

    def outside_blocks(self) -> int:
        """Return the bytes of gathered parameters outside the blocks."""
        return self.inventory.width * build_units(self.inventory, self.choice.shards)[0].padded

    def copied(self) -> int:
        """Return the bytes of the largest unit, which is gathered at once."""
        sizes = (unit.padded for unit in build_units(self.inventory, self.choice.shards))
        return self.inventory.width * max(sizes) if self.choice.shards > 1 else 0

    def assembled(self) -> int:
        """Return the copies of a saved parameter: gloo gathers through another one."""
        return 1 if self.on_gpu or self.choice.shards == 1 else 2

    @property
    def _masters(self) -> bool:
        return self.optimizer.masters or self.inventory.width == FP32

    def gradients_on_host(self) -> int:
        """Return the bytes of gradients in the host's memory."""
        return self.step()

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of the shards of offloaded parameters, and of the gradients of those that are trained."""
        for weight in self.inventory.weights if self.choice.offload_parameters else ():
            local = weight.local(self.choice.shards)
            yield local * (FP32 if weight.trainable else self.inventory.width)
            if weight.trainable:
                yield local * FP32


class FsdpFlow(Flow):
    """Memory of gathered parameters and gradients through a step.

    ``reshard``: gathered parameters are freed after the forward pass. ``offload``: reduced gradients go to the host's
    memory and are accumulated there. ``masters``: shards are fp32, and so are their gradients.
    """

    def __init__(
        self,
        inventory: Inventory,
        shards: int,
        reshard: bool,
        on_gpu: bool,
        offload: bool = False,
        *,
        masters: bool = True,
    ) -> None:
        self._units = build_units(inventory, shards)
        self._width, self._shards = inventory.width, shards
        self._reshard, self._offload, self._masters = reshard, offload, masters
        self._copies = not on_gpu and shards > 1  # gloo gathers and reduces through a copy
        self._gathered = 0  # bytes of gathered parameters
        self._buffer = 0  # left from the last gathering, or filled for the next unit
        self._gradients = 0  # bytes of gradients of full parameters
        self._summed = 0  # bytes of gradients of shards
        self._reducing = 0
        self._first = self._last = True

    @property
    def allocated(self) -> Allocated:  # type: ignore[override]
        """Memory that is allocated now."""
        return Allocated(self._gradients + self._summed, self._gathered + self._buffer, self._reducing)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last = first, last
        if first:
            self._gathered = self._buffer = self._gradients = self._summed = self._reducing = 0

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit`` and return the most memory that was held."""
        if self._reshard and unit > 1:
            self._gathered -= self._bytes(unit - 1)
        if unit == len(self._units) or not (self._reshard or self._first):
            return self.allocated  # already gathered
        size, gathering = self._compute_gathering(unit)
        self._gathered += self._bytes(unit)
        self._buffer = size
        return choose_largest(gathering, self.allocated)

    def forward_ended(self) -> None:
        """End the forward passes."""
        self._buffer = 0

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit`` and return the most memory that was held."""
        if not self._reshard or unit == 0:
            return self.allocated
        highest = self.allocated
        if unit < len(self._units):  # copied out of its buffer
            self._gathered += self._bytes(unit)
            highest = self.allocated
            self._buffer = 0
        return choose_largest(highest, self._prefetch(unit - 1))

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter in the backward pass and return the memory held."""
        if self._reshard or self._first or self._width < FP32:
            self._gradients += self._width * numel
        return self.allocated

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit`` and return the most memory that was held."""
        if unit == len(self._units):
            return self.allocated  # with the embedding
        if self._last or self._reshard:
            return self._reduce(unit)
        return self._keep(unit)

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        highest = self.allocated
        self._reducing = 0
        return highest

    def _bytes(self, unit: int) -> int:
        return self._units[unit].padded * self._width

    def _compute_gathering(self, unit: int) -> tuple[int, Allocated]:
        """Return the bytes of the buffer that ``unit`` is gathered into, and the memory held meanwhile."""
        size = self._bytes(unit) if self._shards > 1 else 0
        copies = size if self._copies else 0
        if self._width < FP32 and self._masters:
            copies += self._units[unit].local_trained * self._width  # frozen ones already have that width
        held_bytes = self._gathered + self._buffer + size + copies
        return size, Allocated(self._gradients + self._summed, held_bytes, self._reducing)

    def _prefetch(self, unit: int) -> Allocated:
        if unit == 0:
            return self.allocated
        size, highest = self._compute_gathering(unit)
        self._buffer += size
        return highest

    def _reduce(self, unit: int) -> Allocated:
        """Reduce a unit's gradients over the ranks, each of which keeps its rows."""
        sizes = self._units[unit]
        self._gathered -= self._bytes(unit)
        self._reducing = FP32 * sizes.trained
        highest = self.allocated
        accumulated_width = 0 if self._reshard or self._first else FP32  # earlier micro-batches left full gradients
        width = self._width if self._reshard or self._first or self._width < FP32 else 0
        self._gradients -= (width + accumulated_width) * sizes.trained
        local_bytes = FP32 * sizes.local_trained
        summed_bytes = local_bytes
        if not self._masters:  # reduced in fp32, and cast; several micro-batches are summed in fp32
            local_bytes += self._width * sizes.local_trained
            if not self._reshard or (self._first and self._last):
                summed_bytes = self._width * sizes.local_trained
        clone = self._reducing if self._copies else 0
        gradients = self._gradients + self._summed + local_bytes
        allocation = Allocated(gradients, self._gathered + self._buffer, self._reducing + clone)
        if (self._first or not self._reshard) and not self._offload:
            self._summed += summed_bytes
        return choose_largest(highest, allocation)

    def _keep(self, unit: int) -> Allocated:
        """Keep a unit's gradients in fp32 until those of later micro-batches are added."""
        if self._width == FP32:
            return self.allocated
        trained_elements = self._units[unit].trained
        self._gradients += (FP32 if self._first else 0) * trained_elements
        highest = self.allocated
        self._gradients -= self._width * trained_elements
        return highest
