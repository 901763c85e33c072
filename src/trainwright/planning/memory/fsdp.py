"""Memory of `fsdp` (parallel/fsdp/fully_sharded.py; torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and
_fsdp_collectives.py).

A block is gathered into one buffer and copied out of it into its parameters. In the forward pass the buffer stays until
the next block is copied out; in the backward pass the next block's buffer is filled while a block runs, and the buffer
from which a block's gradients are reduced stays until the next block's are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from trainwright.planning.memory.inventory import OUTSIDE, Inventory, optimizer_state
from trainwright.planning.memory.strategies import StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow
from trainwright.planning.stack import OWN, Stack


@dataclass(frozen=True)
class ShardedUnit:
    """Element counts of a unit, padded to equal rows on every rank. ``own``: those of the fullest rank."""

    padded: int
    trained: int
    own: int
    own_trained: int


@lru_cache(maxsize=128)
def units(inventory: Inventory, shards: int, expert_parallel: int = 1) -> dict[int, ShardedUnit]:
    """Return the units by number; OUTSIDE is the model itself."""
    sums: dict[int, list[int]] = {}
    for weight in inventory.weights:
        unit = sums.setdefault(weight.unit, [0, 0, 0, 0])
        ranks = weight.ranks(shards, expert_parallel)
        rows = -(-weight.rows // ranks)
        unit[0] += rows * ranks * weight.columns
        unit[2] += rows * weight.columns
        if weight.trainable:
            unit[1] += rows * ranks * weight.columns
            unit[3] += rows * weight.columns
    return {number: ShardedUnit(*values) for number, values in sums.items()}


class FsdpMemory(StrategyMemory):
    """Memory of this rank's shards, which are master weights where they are trained, and of gathered weights."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        inventory, width, stack, shards = self.held, self.width, self.setting.stack, self.choice.shards
        all_units = units(inventory, shards, stack.expert_parallel).values()
        own, trained = sum(unit.own for unit in all_units), sum(unit.own_trained for unit in all_units)
        return {
            "parameters": max(width, stack.kept) * trained + width * (own - trained),
            "optimizer state": int(
                stack.state_bytes * optimizer_state(inventory, self.optimizer, shards, stack.expert_parallel)
            ),
        }

    def flow(self) -> Flow:
        """Return the memory flow of gathered parameters and gradients through a step."""
        choice = self.choice
        offload = choice.offload_parameters and not self.on_cpu
        reshard, stack = choice.reshard_after_forward, self.setting.stack
        return FsdpFlow(self.held, self.width, choice.shards, reshard, self.on_cpu, offload, stack)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        stack = self.setting.stack
        master_width = max(self.width, stack.kept) * (2 if stack.foreach else 1)
        all_units = units(self.held, self.choice.shards, stack.expert_parallel).values()
        return master_width * sum(unit.own_trained for unit in all_units)

    def gradients_on_host(self) -> int:
        """Return the bytes of gradients in the host's memory."""
        return self.step()

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of the shards of offloaded parameters, and of the gradients of those that are trained."""
        master_width = max(self.width, self.setting.stack.kept)
        for weight in self.held.weights if self.choice.offload_parameters else ():
            own = -(-weight.rows // self.choice.shards) * weight.columns
            yield own * (master_width if weight.trainable else self.width)
            if weight.trainable:
                yield own * master_width


class FsdpFlow(Flow):
    """Memory of gathered parameters and gradients through a step.

    ``width``: bytes per element of gathered weights. ``reshard``: they are freed after the forward pass. ``offload``:
    reduced gradients go to the host's memory and are accumulated there.
    """

    def __init__(
        self,
        inventory: Inventory,
        width: int,
        shards: int,
        reshard: bool,
        on_cpu: bool,
        offload: bool = False,
        stack: Stack = OWN,
    ) -> None:
        self._kept, self._exchanged = max(width, stack.kept), max(width, stack.exchanged)
        self._units = units(inventory, shards, stack.expert_parallel)
        self._on_cpu = on_cpu  # gloo gathers and reduces through a copy
        self._last_block = max(self._units)
        self._width = width
        self._shards = shards
        self._reshard = reshard
        self._sums_unsharded = stack.sums_unsharded
        self._offload = offload
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
        if self._reshard or self._first:
            if self._reshard and unit > 0:
                self._whole -= self._bytes(unit - 1)
            return self._copied_out(unit, *self._gathering(unit), keep=True)
        return self.held

    def head(self) -> Allocated:
        """Return the memory held while the head runs."""
        if self._reshard and self._last_block != OUTSIDE:
            self._whole -= self._bytes(self._last_block)
        return self.held

    def forward_ended(self) -> None:
        """End the forward passes."""
        self._buffer = 0

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit`` and return the most memory that was held."""
        if not self._reshard:
            return self.held
        if unit == OUTSIDE:
            return self._prefetch(self._last_block)
        before = self._buffer
        self._buffer = 0
        highest = self._copied_out(unit, before, self.held, keep=False)
        return highest if unit == 0 else max(highest, self._prefetch(unit - 1), key=lambda held: held.total)

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the memory held."""
        if self._reshard or self._first or self._width < self._kept:
            self._gradients += self._width * numel
        return self.held

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit`` and return the most memory that was held."""
        if self._last or (self._reshard and not self._sums_unsharded):
            return self._reduce(unit)
        if self._reshard:
            self._whole -= self._bytes(unit)
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
        copies = size if self._on_cpu else 0
        if self._width < self._kept:
            copies += self._units[unit].own_trained * self._width  # frozen ones already have that width
        return size, Allocated(
            self._gradients + self._summed, self._whole + self._buffer + size + copies, self._reducing
        )

    def _copied_out(self, unit: int, buffer: int, gathering: Allocated, keep: bool) -> Allocated:
        self._whole += self._bytes(unit)
        self._buffer = buffer
        highest = max(gathering, self.held, key=lambda held: held.total)
        if not keep:
            self._buffer = 0
        return highest

    def _prefetch(self, unit: int) -> Allocated:
        if unit == OUTSIDE:
            return self.held
        size, highest = self._gathering(unit)
        self._buffer += size
        return highest

    def _reduce(self, unit: int) -> Allocated:
        """Reduce a unit's gradients over the ranks, each of which keeps its rows."""
        sizes = self._units[unit]
        self._whole -= self._bytes(unit)
        self._reducing = self._exchanged * sizes.trained
        highest = self.held
        sharded = self._reshard and not self._sums_unsharded  # earlier micro-batches left sharded gradients
        accumulated = 0 if sharded or self._first else self._summed_in
        own = self._width if self._reshard or self._first or self._width < self._kept else 0
        self._gradients -= (own + accumulated) * sizes.trained
        mine = self._kept * sizes.own_trained
        clone = self._reducing if self._on_cpu and self._shards > 1 else 0
        reduced = Allocated(self._gradients + self._summed + mine, self._whole + self._buffer, self._reducing + clone)
        if (self._first or not sharded) and not self._offload:
            self._summed += mine
        return max(highest, reduced, key=lambda held: held.total)

    @property
    def _summed_in(self) -> int:
        """Bytes per element of gradients that are accumulated in place."""
        return self._exchanged if self._sums_unsharded else self._kept

    def _keep(self, unit: int) -> Allocated:
        """Keep a unit's gradients in fp32 until those of later micro-batches are added."""
        arrived = self._reshard or self._first or self._width < self._kept
        if self._width == self._summed_in and (self._first or not arrived):
            return self.held
        trained = self._units[unit].trained
        self._gradients += (self._summed_in if self._first else 0) * trained
        highest = self.held
        self._gradients -= self._width * trained
        return highest
