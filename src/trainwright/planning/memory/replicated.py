"""Memory of `single` and `ddp` (parallel/replicated/replicated.py, parallel/replicated/gradients.py)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

from trainwright.parallel.constants import CACHED_ELEMENTS
from trainwright.parallel.replicated.spec import STEP_ELEMENTS
from trainwright.planning.memory.inventory import Inventory, optimizer_state
from trainwright.planning.memory.strategies import StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow
from trainwright.planning.stack import OWN, Stack


class ReplicatedMemory(StrategyMemory):
    """Memory of a full model on every rank, with fp32 master weights if it computes in a lower precision."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        held, width, stack = self.held, self.width, self.setting.stack
        kept = max(width, stack.kept)
        return {
            "parameters": held.numel * width,
            "master weights": held.trained * kept if width < kept else 0,
            "optimizer state": int(stack.state_bytes * optimizer_state(held, self.optimizer)),
        }

    def flow(self) -> Flow:
        """Return the memory flow of gradients through a step."""
        bucket_bytes = self.choice.spec.bucket_bytes
        return ReplicatedFlow(self.held, self.width, self._exchanges, self.setting.stack, bucket_bytes)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        width, stack, total, largest = self.width, self.setting.stack, self.held.trained, self.held.largest_trained
        kept = max(width, stack.kept)
        if stack.updates_in_backward:
            return width * largest
        if stack.foreach:
            return (width + kept) * total
        if width == kept or self._exchanges or self.choice.gradient_accumulation_steps > 1:
            return kept * total
        part = min(total, STEP_ELEMENTS)
        return width * (total - part) + kept * part + width * largest

    @property
    def _exchanges(self) -> bool:
        return self.choice.num_processes > 1


class ReplicatedFlow(Flow):
    """Gradients of a full model: ``width`` bytes per element as autograd makes them, fp32 once they are accumulated."""

    def __init__(
        self, inventory: Inventory, width: int, exchange: bool, stack: Stack = OWN, bucket_bytes: int | None = None
    ) -> None:
        self._inventory = inventory
        self._width = width
        self._kept = max(width, stack.kept)
        self._one_by_one = stack.updates_in_backward
        self._ends = _bucket_ends(inventory, self._kept, bucket_bytes) if exchange else ()
        self._own = 0  # bytes in the parameters' own gradients
        self._sums = 0  # bytes in sums over earlier micro-batches or over the ranks
        self._arrived = self._started = 0  # elements whose gradients are ready; buckets that are exchanged
        self._first = self._last = True

    @property
    def held(self) -> Allocated:  # type: ignore[override]
        """Memory that is held now."""
        return Allocated(self._own + self._sums)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last = first, last
        self._arrived = self._started = 0
        if first:
            self._own = self._sums = 0

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the most memory that was held."""
        if self._one_by_one:  # freed as soon as the weight is updated
            return Allocated(self._width * min(numel, self._inventory.largest_trained))
        exchanged = self._last and bool(self._ends)
        if self._width < self._kept and not exchanged and not (self._first and self._last):
            return self._add(numel)
        if self._width < self._kept or self._first:
            self._own += self._width * numel
        self._arrived += numel
        return self._exchange() if exchanged else self.held

    def _add(self, numel: int) -> Allocated:
        """Add gradients to their sums one by one, and free them."""
        largest = min(numel, self._inventory.largest_trained)
        if self._first:
            self._sums += self._kept * numel
        copied = 0 if self._first else self._kept * min(largest, CACHED_ELEMENTS)
        return Allocated(self._sums + self._width * largest + copied)

    def _exchange(self) -> Allocated:
        """Copy the gradients of every full bucket into one tensor, and free them."""
        full = bisect_right(self._ends, self._arrived, lo=self._started)
        if full == self._started:
            return self.held
        begin = self._ends[self._started - 1] if self._started else 0
        numel, first = self._ends[full - 1] - begin, self._ends[self._started] - begin
        most = Allocated(self._own + self._sums, buckets=self._kept * first)
        self._own -= self._width * numel
        if self._width == self._kept or self._first:
            self._sums += self._kept * numel
        self._started = full
        return most


@lru_cache(maxsize=64)
def _bucket_ends(inventory: Inventory, kept: int, bucket_bytes: int | None) -> tuple[int, ...]:
    """Return the end of each bucket in elements from the last parameter, about the order in which gradients arrive."""
    if bucket_bytes is None:
        return (inventory.trained,)
    ends: list[int] = []
    bucket_left = 0
    for weight in reversed(inventory.weights):
        if weight.trainable:
            size = kept * weight.numel
            if size > bucket_left:
                ends.append(ends[-1] if ends else 0)
                bucket_left = bucket_bytes
            ends[-1] += weight.numel
            bucket_left -= size
    return tuple(ends)
