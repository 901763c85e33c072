"""Memory of `zero1`, `zero2` and `zero3` (parallel/zero/zero.py, parallel/zero/deepspeed_config.py; DeepSpeed 0.19's
runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py and runtime/bf16_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from trainwright.parallel.zero.spec import stage_of
from trainwright.planning.memory.inventory import OUTSIDE, Inventory, Weight
from trainwright.planning.memory.strategies import StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow
from trainwright.planning.stack import OWN, Stack

_FP32 = 4
_SLOTS = 2  # AdamW's two moments; no other optimizer's state is partitioned
# Number of gradient elements that DeepSpeed's engine copies and all-reduces at a time (runtime/engine.py).
_ALL_REDUCED = 5 * 10**8
# DeepSpeed's stage3_max_reuse_distance: parameters used again within this number of elements stay gathered.
_REUSE = 10**9


def bucket(inventory: Inventory, stack: Stack = OWN) -> int:
    """Return the number of elements that are reduced, and with zero3 gathered, at a time."""
    return max(2, min(stack.bucket, inventory.numel))


@lru_cache(maxsize=64)
def _partition(inventory: Inventory, shards: int) -> tuple[int, int]:
    """Return the elements of a rank's partition in zero1 and zero2, and the most elements of all parameters that
    overlap it.

    Matrices and vectors are partitioned separately (engine/optimizer.py), each group concatenated.
    """
    own = 0
    touched = [0] * shards
    for vectors in (False, True):
        group = [w.numel for w in inventory.weights if w.trainable and (w.columns == 1) == vectors]
        size = -(-sum(group) // (2 * shards)) * 2
        own += size
        begin = 0
        for numel in group:
            for rank in range(begin // max(1, size), min(shards, -(-(begin + numel) // max(1, size)))):
                touched[rank] += numel
            begin += numel
    return own, max(touched)


class ZeroMemory(StrategyMemory):
    """Memory of DeepSpeed's flat partitions, and of the tensors that its stage does not partition."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        return _lasting(self.held, self._stage, self.width, self.choice.shards, self.setting.stack)

    def flow(self) -> Flow:
        """Return the memory flow of gathered parameters and gradients through a step."""
        if self._stage == 3:
            return Stage3Flow(self.held, self.width, self.on_cpu, self.setting.stack)
        offload = self.choice.offload_optimizer and not self.on_cpu
        return Stage12Flow(self.held, self._stage, self.width, self.choice.shards, offload, self.setting.stack)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        return _step(self.held, self._stage, self.width, self.choice.shards, self.on_cpu)

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of this rank's computing parameters, which stage 3 pins group by group; masters are not."""
        if self._stage < 3 or not self.choice.offload_parameters:
            return
        for vectors in (False, True):
            group = (w for w in self.held.weights if w.trainable and (w.columns == 1) == vectors)
            yield self.width * sum(-(-weight.numel // self.choice.shards) for weight in group)

    @property
    def _stage(self) -> int:
        return stage_of(self.choice.spec)


class Stage12Flow(Flow):
    """Memory of gradients in stages 1 and 2.

    ``width``: bytes per element of weights and of the gradients that autograd makes. ``offload``: the optimizer state
    is in the host's memory. Reduced gradients move there bucket by bucket, unless they are summed in a wider dtype than
    the weights' (stage_1_and_2.py: _use_compact_grad_partition_buffer); then they stay on the device.
    """

    def __init__(
        self, inventory: Inventory, stage: int, width: int, shards: int, offload: bool = False, stack: Stack = OWN
    ) -> None:
        self._trained = inventory.trained
        self._largest = inventory.largest_trained
        self._stage, self._width = stage, width
        self._sums = max(width, stack.exchanged)
        self._bucket = bucket(inventory, stack)
        self._leaves = offload and self._sums == width
        self._own, self._touched = _partition(inventory, shards)
        self._gradients = 0  # bytes in the parameters' own gradients
        self._reduced = 0  # bytes of this rank's partition
        self._buffer = 0
        self._filled = 0  # elements in the buffer
        self._loose = 0  # elements of a gradient that is larger than the buffer
        self._counted = False  # whether ``_reduced`` includes the micro-batch's part of the partition
        self._first = self._last = True

    @property
    def held(self) -> Allocated:  # type: ignore[override]
        """Memory that is held now."""
        reduced = 0 if self._leaves else self._reduced
        return Allocated(gradients=self._gradients + reduced, buckets=self._buffer)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last, self._counted = first, last, False
        if first:
            self._gradients = self._reduced = self._buffer = self._filled = self._loose = 0

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the memory held at most."""
        if self._stage == 1 and self._width < self._sums:  # added to flat gradients at the end (BF16_Optimizer)
            self._gradients += self._width * numel * self._first
            return self.held
        self._buffer = self._bucket * self._width
        if self._stage == 2 and not name:  # a whole block, reduced as its gradients arrive
            self._filled = numel % self._bucket
            self._reduced = max(self._reduced, self._sums * self._kept_of_partition())
            self._counted = True
            return self.held
        if self._stage == 2 or self._first:
            self._gradients += self._width * numel
        return self._into_bucket(numel) if self._stage == 2 else self.held

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        highest = self.held
        if self._stage == 1 and self._width < self._sums:
            return highest._replace(buckets=_FP32 * (min(self._trained, _ALL_REDUCED) if self._last else self._largest))
        if self._stage == 1:
            if not self._last:
                return highest
            # Memory falls from bucket to bucket, so all but two of the full buckets are skipped.
            full, rest = divmod(self._trained, self._bucket)
            passed_over = max(0, full - 2)
            for part in (*([self._bucket] * (full - passed_over)), *([rest] if rest else [])):
                highest = max(highest, self._into_bucket(part), key=_total)
            self._gradients -= self._width * passed_over * self._bucket
        highest = max(highest, self._reduce(), key=_total)
        self._buffer = 0
        if self._width == self._sums and not self._first:  # added to those of earlier micro-batches
            self._reduced -= self._sums * self._touched if self._stage == 2 else 0
        return highest

    def _kept_of_partition(self) -> int:
        return self._touched if self._width == self._sums else self._own

    def _into_bucket(self, numel: int) -> Allocated:
        """Move a gradient to the buffer, which is reduced first if it is full."""
        highest = self.held
        if self._filled + numel > self._bucket:
            highest = max(highest, self._reduce(), key=_total)
        self._filled += numel
        if numel > self._bucket:
            self._loose = numel
        else:
            self._gradients -= self._width * numel
        return highest

    def _reduce(self) -> Allocated:
        """Sum the buffer over the ranks, from a copy in fp32; this rank's part is kept."""
        if not self._filled:
            return self.held
        if self._width < self._sums:
            self._reduced = self._sums * self._own
        copies = self._filled * (self._width + (self._sums if self._width < self._sums else 0))
        highest = Allocated(self._gradients + (0 if self._leaves else self._reduced), 0, self._buffer + copies)
        if self._width == self._sums and not self._counted:
            self._reduced += self._sums * self._touched
            self._counted = True
        self._gradients -= self._width * self._loose
        self._filled = self._loose = 0
        return max(highest, self.held, key=_total)


class Stage3Flow(Flow):
    """Memory of gathered parameters in stage 3: one chunk of every parameter per rank; vectors are not cut."""

    def __init__(self, inventory: Inventory, width: int, on_cpu: bool, stack: Stack = OWN) -> None:
        self._units, self._sharded = _sharded(inventory)
        self._sums = max(width, stack.exchanged)
        self._last_block = max(self._units)
        self._width = width
        self._bucket = bucket(inventory, stack)
        self._on_cpu = on_cpu
        self._frozen_ends = _frozen_ends(inventory) * width
        self._first_numel = sum(self._sharded.get((OUTSIDE, name), 0) for name in ("embedding", "positions"))
        self._whole = self._buffer = self._gradients = self._filled = 0

    @property
    def held(self) -> Allocated:  # type: ignore[override]
        """Memory that is held now."""
        return Allocated(self._gradients, self._whole + self._buffer)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._whole = self._buffer = self._gradients = self._filled = 0
        self._ahead = OUTSIDE - 1  # the last gathered unit

    def forward(self, unit: int) -> Allocated:
        """Run the forward pass of ``unit`` and return the most memory that was held."""
        highest = self.held
        if unit > self._ahead:
            highest = self._gather(unit)
        if unit == 0:
            self._whole = max(0, self._whole - self._frozen_ends)
        return highest

    def head(self) -> Allocated:
        """Return the memory held while the head runs."""
        self._buffer = 0  # it was freed when the last weight in it was used
        return self.held

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit`` and return the memory held."""
        if self._units.get(unit, 0) * self._width > self._whole:
            self._whole = min(self._limit(), self._whole + self._bucket * self._width)
        return self.held

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the most memory that was held."""
        highest = Allocated(self._gradients + self._width * numel, self._whole + self._buffer)
        if self._filled and self._filled + numel > self._bucket:
            highest = max(highest, self._reduce(), key=_total)
        if numel > self._bucket:
            self._gradients += self._width * numel
        self._filled += numel
        released = self._sharded.get((unit, name), 0) if name else self._units.get(unit, 0)
        self._whole = max(0, self._whole - self._width * released)
        return highest

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        highest = self._reduce()
        self._whole = 0
        return highest

    def _limit(self) -> int:
        """Return the most bytes of gathered parameters; those that are used again soon stay gathered."""
        total = sum(self._units.values())
        return self._width * (total if 2 * total < _REUSE else min(total, _REUSE // 2 + self._bucket))

    def _gather(self, unit: int) -> Allocated:
        """Gather ``unit`` and the units after it, up to a bucket, into a buffer, and copy the parameters out of it.

        The embedding runs first: it has a buffer of its own, which is free when what follows it has been gathered.
        """
        size = 0
        self._ahead = unit - 1
        for following in range(unit, self._last_block + 1):
            if size and size + self._units.get(following, 0) > self._bucket:
                break
            size += self._units.get(following, 0)
            self._ahead = following
        buffer = size * self._width
        self._buffer = buffer - (self._first_numel * self._width if unit == OUTSIDE else 0)
        gathering = Allocated(self._gradients, self._whole + buffer * (2 if self._on_cpu else 1))
        self._whole = min(self._limit(), self._whole + buffer)
        return max(gathering, self.held, key=_total)

    def _reduce(self) -> Allocated:
        """Sum the buffer over the ranks from a copy of it; gloo makes one more copy."""
        copies = self._sums * self._filled * (2 if self._on_cpu else 1)
        highest = Allocated(self._gradients, self._whole + self._buffer, copies)
        self._filled = self._gradients = 0
        return highest


@lru_cache(maxsize=64)
def _sharded(inventory: Inventory) -> tuple[dict[int, int], dict[tuple[int, str], int]]:
    """Return the number of partitioned elements, by unit and by parameter."""
    units: dict[int, int] = {}
    cut = [w for w in inventory.weights if not persists(w, inventory)]
    for weight in cut:
        units[weight.unit] = units.get(weight.unit, 0) + weight.numel
    return units, {(w.unit, w.name): w.numel for w in cut}


def _frozen_ends(inventory: Inventory) -> int:
    """Return the number of partitioned frozen elements that only run before the blocks and so have no backward pass."""
    tied = not any(w.name == "head" for w in inventory.weights)
    first = [w for w in inventory.weights if w.name == "positions" or (w.name == "embedding" and not tied)]
    return sum(w.numel for w in first if not w.trainable and not persists(w, inventory))


def _total(allocated: Allocated) -> int:
    return allocated.total


def persists(weight: Weight, inventory: Inventory) -> bool:
    """Return whether zero3 keeps a parameter in full on every rank: if it is no larger than the largest vector."""
    return weight.numel <= _largest_vector(inventory)


@lru_cache(maxsize=64)
def _largest_vector(inventory: Inventory) -> int:
    return max((w.numel for w in inventory.weights if w.columns == 1 and not w.packed), default=0)


@lru_cache(maxsize=64)
def _lasting(inventory: Inventory, stage: int, width: int, shards: int, stack: Stack = OWN) -> Mapping[str, int]:
    """Return the bytes held between steps, by purpose."""
    trained = inventory.trained
    if stage < 3:
        own = _partition(inventory, shards)[0]
        return {
            "parameters": inventory.numel * width,
            "master weights": own * _FP32,
            "optimizer state": own * _FP32 * _SLOTS,
            "gradients": trained * _FP32 if stage == 1 and width < stack.exchanged else 0,
        }
    own = sum(-(-w.numel // shards) for w in inventory.weights if w.trainable)
    frozen = sum(-(-w.numel // shards) for w in inventory.weights if not w.trainable)
    persistent = sum(w.numel for w in inventory.weights if persists(w, inventory))
    return {
        "parameters": (own + frozen + persistent) * width,
        "master weights": own * _FP32 if width < _FP32 else 0,
        "optimizer state": own * _FP32 * _SLOTS,
        "gradients": own * max(width, stack.exchanged),
        "gradient buckets": bucket(inventory, stack) * max(width, stack.exchanged),
    }


@lru_cache(maxsize=64)
def _step(inventory: Inventory, stage: int, width: int, shards: int, on_cpu: bool) -> int:
    """Return the most bytes that an optimizer step needs in addition to those held between steps."""
    if stage == 3:
        return _FP32 * sum(-(-w.numel // shards) for w in inventory.weights if w.trainable and w.columns > 1)
    own, touched = _partition(inventory, shards)
    gathered = width * sum(w.numel for w in inventory.weights if w.trainable and w.columns > 1) if on_cpu else 0
    if stage == 1 and width < _FP32:
        return width * inventory.trained + gathered
    if width < _FP32:
        return _FP32 * own + gathered
    return _FP32 * touched + max(_FP32 * own, gathered)
