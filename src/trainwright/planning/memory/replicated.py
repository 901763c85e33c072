"""Memory of `single` and `ddp` (parallel/replicated/replicated.py): a full model on every rank, with fp32 master
weights if it computes in a lower precision.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

from trainwright.parallel.constants import CACHED_ELEMENTS, step_elements
from trainwright.planning.memory.inventory import Inventory, sum_optimizer_state
from trainwright.planning.memory.strategies import FP32, StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow


class ReplicatedMemory(StrategyMemory):
    """Memory of a full model on every rank."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        inventory, width = self.inventory, self.inventory.width
        return {
            "parameters": inventory.numel * width,
            "master weights": inventory.trained * FP32 if width < FP32 and self.optimizer.masters else 0,
            "optimizer state": sum_optimizer_state(inventory, self.optimizer),
        }

    def flow(self) -> Flow:
        """Return the memory flow of gradients through a step."""
        return ReplicatedFlow(self.inventory, self._exchanges, self.choice.spec.bucket_bytes)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        width, trained_elements = self.inventory.width, self.inventory.trained
        part = max(self.inventory.largest_trained, min(trained_elements, step_elements(self.on_gpu)))
        masters = 0 if self.optimizer.masters else FP32 * part
        if width == FP32 or self._exchanges or self.choice.gradient_accumulation_steps > 1:
            return FP32 * trained_elements + masters
        return width * trained_elements + FP32 * part + masters

    @property
    def _exchanges(self) -> bool:
        return self.choice.num_processes > 1


class ReplicatedFlow(Flow):
    """Gradients of a full model, in its width as autograd makes them, and in fp32 once they are accumulated."""

    def __init__(self, inventory: Inventory, exchanges: bool, bucket_bytes: int | None = None) -> None:
        self._width = inventory.width
        self._largest = inventory.largest_trained
        self._ends = _compute_bucket_ends(inventory, bucket_bytes) if exchanges else ()
        self._gradients = 0  # bytes of gradients that are not in a sum
        self._sums = 0  # bytes in sums over earlier micro-batches or over the ranks
        self._arrived = self._started = 0  # elements whose gradients are ready; buckets that are exchanged
        self._first = self._last = True

    @property
    def allocated(self) -> Allocated:  # type: ignore[override]
        """Memory that is allocated now."""
        return Allocated(self._gradients + self._sums)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last = first, last
        self._arrived = self._started = 0
        if first:
            self._gradients = self._sums = 0

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter and return the most memory that was held."""
        exchanged = self._last and bool(self._ends)
        if self._width < FP32 and not exchanged and not (self._first and self._last):
            return self._add(numel)
        if self._width < FP32 or self._first:
            self._gradients += self._width * numel
        self._arrived += numel
        return self._exchange() if exchanged else self.allocated

    def _add(self, numel: int) -> Allocated:
        """Add gradients to their sums one by one, and free them."""
        largest = min(numel, self._largest)
        if self._first:
            self._sums += FP32 * numel
        copy_bytes = 0 if self._first else FP32 * min(largest, CACHED_ELEMENTS)
        return Allocated(self._sums + self._width * largest + copy_bytes)

    def _exchange(self) -> Allocated:
        """Copy the gradients of every full bucket into one tensor, and free them."""
        full = bisect_right(self._ends, self._arrived, lo=self._started)
        if full == self._started:
            return self.allocated
        begin = self._ends[self._started - 1] if self._started else 0
        numel, first = self._ends[full - 1] - begin, self._ends[self._started] - begin
        highest = Allocated(self._gradients + self._sums, buckets=FP32 * first)
        self._gradients -= self._width * numel
        if self._width == FP32 or self._first:
            self._sums += FP32 * numel
        self._started = full
        return highest


@lru_cache(maxsize=64)
def _compute_bucket_ends(inventory: Inventory, bucket_bytes: int | None) -> tuple[int, ...]:
    """Return the end of each bucket in elements from the last parameter, about the order in which gradients arrive."""
    if bucket_bytes is None:
        return (inventory.trained,)
    ends: list[int] = []
    bucket_left = 0
    for weight in reversed(inventory.trainable):
        size = FP32 * weight.numel
        if size > bucket_left:
            ends.append(ends[-1] if ends else 0)
            bucket_left = bucket_bytes
        ends[-1] += weight.numel
        bucket_left -= size
    return tuple(ends)
