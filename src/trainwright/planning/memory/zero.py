"""Memory of `zero1`, `zero2` and `zero3` (parallel/zero/zero.py, parallel/zero/deepspeed_config.py; DeepSpeed 0.19's
runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py and runtime/bf16_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from trainwright.parallel.zero.spec import BUCKET_ELEMENTS, count_sharded_parts
from trainwright.planning.memory.inventory import Inventory, Weight, count_slots
from trainwright.planning.memory.strategies import FP32, StrategyMemory
from trainwright.planning.memory.walk import Allocated, Flow, choose_largest

# Number of gradient elements that DeepSpeed's engine copies and all-reduces at a time (runtime/engine.py).
_ALL_REDUCED = 5 * 10**8
# DeepSpeed's stage3_max_reuse_distance: parameters used again within this number of elements stay gathered.
_REUSE = 10**9


def choose_bucket(inventory: Inventory) -> int:
    """Return the number of elements that are reduced, and with zero3 gathered, at a time."""
    return max(2, min(BUCKET_ELEMENTS, inventory.numel))


def _list_groups(inventory: Inventory, decay: bool) -> list[list[Weight]]:
    """Return the trained parameters in the optimizer's groups: vectors have no weight decay (engine/optimizer.py)."""
    groups = [[w for w in inventory.trainable if w.is_vector == vectors] for vectors in (False, True)]
    return [group for group in groups if group] if decay else [list(inventory.trainable)]


@lru_cache(maxsize=64)
def _count_largest_group(inventory: Inventory, decay: bool) -> int:
    """Return the elements of the largest group."""
    return max((sum(w.numel for w in group) for group in _list_groups(inventory, decay)), default=0)


@lru_cache(maxsize=64)
def _compute_partition(inventory: Inventory, shards: int, decay: bool) -> tuple[int, int]:
    """Return the elements of a rank's partition in zero1 and zero2, and the most elements of all parameters that
    overlap it. The parameters of a group are concatenated.
    """
    local = 0
    touched_elements = [0] * shards
    for members in _list_groups(inventory, decay):
        group = [w.numel for w in members]
        size = -(-sum(group) // (2 * shards)) * 2
        local += size
        begin = 0
        for numel in group:
            for rank in range(begin // max(1, size), min(shards, -(-(begin + numel) // max(1, size)))):
                touched_elements[rank] += numel
            begin += numel
    return local, max(touched_elements)


class ZeroMemory(StrategyMemory):
    """Memory of DeepSpeed's flat partitions, and of the tensors that its stage does not partition."""

    def lasting(self) -> Mapping[str, int]:
        """Return the bytes held between steps, by purpose."""
        optimizer = self.optimizer
        return _estimate_lasting(
            self.inventory, self._stage, self.choice.shards, count_slots(optimizer), optimizer.decay
        )

    def flow(self) -> Flow:
        """Return the memory flow of gathered parameters and gradients through a step."""
        if self._stage == 3:
            return Stage3Flow(self.inventory, self.on_gpu)
        offload = self.choice.offload_optimizer and self.on_gpu
        return Stage12Flow(self.inventory, self._stage, self.choice.shards, offload, self.optimizer.decay)

    def step(self) -> int:
        """Return the bytes that the optimizer step needs in addition."""
        return _estimate_step(self.inventory, self._stage, self.choice.shards, self.on_gpu, self.optimizer.decay)

    def gathered(self) -> int:
        """Return the bytes of all parameters that are partitioned, and of gloo's copies of the two that it gathers at
        once.
        """
        if self._stage < 3:
            return 0
        units, _, sizes = _count_sharded(self.inventory)
        return self.inventory.width * (sum(units) + sum(sorted(sizes.values())[-2:]))

    def copied(self) -> int:
        """Return the bytes of what is gathered at once: a bucket of parameters, or after a step a group of them."""
        if self.choice.shards == 1:
            return 0
        group = _count_largest_group(self.inventory, self.optimizer.decay)
        return self.inventory.width * (choose_bucket(self.inventory) if self._stage == 3 else group)

    def assembled(self) -> int:
        """Return the copies of a saved parameter, which is the sum of all ranks' parts."""
        return 1

    def pinned(self) -> Iterator[int]:
        """Yield the bytes of this rank's computing parameters, which stage 3 pins group by group; masters are not."""
        if self._stage < 3 or not self.choice.offload_parameters:
            return
        for group in _list_groups(self.inventory, self.optimizer.decay):
            yield self.inventory.width * sum(-(-weight.numel // self.choice.shards) for weight in group)

    @property
    def _stage(self) -> int:
        return count_sharded_parts(self.choice.spec)


class Stage12Flow(Flow):
    """Memory of gradients in stages 1 and 2.

    ``offload``: the optimizer state is in the host's memory. Reduced gradients move there bucket by bucket, unless they
    are summed in a wider dtype than the weights' (stage_1_and_2.py: _use_compact_grad_partition_buffer); then they stay
    on the device.
    """

    def __init__(self, inventory: Inventory, stage: int, shards: int, offload: bool, decay: bool) -> None:
        self._trained = inventory.trained
        groups = [sum(w.numel for w in group) for group in _list_groups(inventory, decay)]
        # Elements of the gradients of groups that are concatenated for the all-reduce; a single group is not copied.
        self._concatenated = self._trained if len(groups) > 1 and groups[0] <= _ALL_REDUCED else 0
        self._largest = inventory.largest_trained
        self._stage, self._width = stage, inventory.width
        self._bucket = choose_bucket(inventory)
        self._leaves = offload and self._width == FP32
        self._local, self._touched = _compute_partition(inventory, shards, decay)
        self._gradients = 0  # bytes in the parameters' own gradients
        self._reduced = 0  # bytes of this rank's partition
        self._buffer = 0
        self._filled = 0  # elements in the buffer
        self._loose = 0  # elements of a gradient that is larger than the buffer
        self._counted = False  # whether ``_reduced`` includes the micro-batch's part of the partition
        self._first = self._last = True

    @property
    def allocated(self) -> Allocated:  # type: ignore[override]
        """Memory that is allocated now."""
        reduced_bytes = 0 if self._leaves else self._reduced
        return Allocated(gradients=self._gradients + reduced_bytes, buckets=self._buffer)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._first, self._last, self._counted = first, last, False
        if first:
            self._gradients = self._reduced = self._buffer = self._filled = self._loose = 0

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a weight in the backward pass and return the memory held at most."""
        if self._stage == 1 and self._width < FP32:  # added to flat gradients at the end (BF16_Optimizer)
            self._gradients += self._width * numel * self._first
            return self.allocated
        self._buffer = self._bucket * self._width
        if self._stage == 2 and not name:  # a whole block, reduced as its gradients arrive
            self._filled = numel % self._bucket
            self._reduced = max(self._reduced, FP32 * (self._touched if self._width == FP32 else self._local))
            self._counted = True
            return self.allocated
        if self._stage == 2 or self._first:
            self._gradients += self._width * numel
        return self._add_to_bucket(numel) if self._stage == 2 else self.allocated

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        highest = self.allocated
        if self._stage == 1 and self._width < FP32:
            return highest._replace(buckets=FP32 * max(self._largest, self._concatenated if self._last else 0))
        if self._stage == 1:
            if not self._last:
                return highest
            # Memory falls from bucket to bucket, so all but two of the full buckets are skipped.
            full, rest = divmod(self._trained, self._bucket)
            passed_over = max(0, full - 2)
            for part in (*([self._bucket] * (full - passed_over)), *([rest] if rest else [])):
                highest = choose_largest(highest, self._add_to_bucket(part))
            self._gradients -= self._width * passed_over * self._bucket
        highest = choose_largest(highest, self._reduce())
        self._buffer = 0
        if self._width == FP32 and not self._first:  # added to those of earlier micro-batches
            self._reduced -= FP32 * self._touched if self._stage == 2 else 0
        return highest

    def _add_to_bucket(self, numel: int) -> Allocated:
        """Move a gradient to the buffer, which is reduced first if it is full."""
        highest = self.allocated
        if self._filled + numel > self._bucket:
            highest = choose_largest(highest, self._reduce())
        self._filled += numel
        if numel > self._bucket:
            self._loose = numel
        else:
            self._gradients -= self._width * numel
        return highest

    def _reduce(self) -> Allocated:
        """Sum the buffer over the ranks, from a copy in fp32; this rank's part is kept."""
        if not self._filled:
            return self.allocated
        if self._width < FP32:
            self._reduced = FP32 * self._local
        copies = self._filled * (self._width + (FP32 if self._width < FP32 else 0))
        highest = Allocated(self._gradients + (0 if self._leaves else self._reduced), 0, self._buffer + copies)
        if self._width == FP32 and not self._counted:
            self._reduced += FP32 * self._touched
            self._counted = True
        self._gradients -= self._width * self._loose
        self._filled = self._loose = 0
        return choose_largest(highest, self.allocated)


class Stage3Flow(Flow):
    """Memory of gathered parameters in stage 3: one chunk of every parameter per rank; small ones are not cut."""

    def __init__(self, inventory: Inventory, on_gpu: bool) -> None:
        self._units, self._frozen, self._sizes = _count_sharded(inventory)
        self._width = inventory.width
        self._bucket = choose_bucket(inventory)
        self._copies = 1 if on_gpu else 2  # gloo gathers and reduces through a copy
        self._frozen_at_first = _count_frozen_before_blocks(inventory) * self._width
        self._gathered = self._buffer = self._gradients = self._filled = 0

    @property
    def allocated(self) -> Allocated:  # type: ignore[override]
        """Memory that is allocated now."""
        return Allocated(self._gradients, self._gathered + self._buffer)

    def begin(self, first: bool, last: bool) -> None:
        """Begin a pass over a micro-batch, the first or the last of its step."""
        self._gathered = self._buffer = self._gradients = self._filled = 0
        self._ahead = -1  # the last gathered unit

    def forward(self, unit: int) -> Allocated:
        """Begin the forward pass of ``unit`` and return the most memory that was held."""
        highest = self._gather(unit) if unit > self._ahead else self.allocated
        if unit == 1:
            self._gathered = max(0, self._gathered - self._frozen_at_first)
        if unit == len(self._units) - 1:
            self._buffer = 0  # it was freed when the last weight in it was used
        return highest

    def backward(self, unit: int) -> Allocated:
        """Begin the backward pass of ``unit`` and return the memory held."""
        if self._units[unit] * self._width > self._gathered:
            self._gathered = min(self._limit(), self._gathered + self._bucket * self._width)
        return self.allocated

    def arrive(self, unit: int, name: str, numel: int) -> Allocated:
        """Add the gradient of a parameter in the backward pass and return the most memory that was held."""
        if not name and numel > self._bucket:  # a whole block, reduced as its gradients arrive
            self._gradients, self._filled, highest = 0, numel % self._bucket, self.allocated
        else:
            highest = self._add_to_bucket(numel)
        self._release(unit, self._sizes.get((unit, name), 0) if name else self._units[unit] - self._frozen[unit])
        return highest

    def unit_ended(self, unit: int) -> Allocated:
        """End the backward pass of ``unit``, which releases its frozen parameters; return the memory held before."""
        before = self.allocated
        self._release(unit, self._frozen[unit])
        return before

    def _release(self, unit: int, numel: int) -> None:
        if 0 < unit < len(self._units) - 1:  # what is outside the blocks is released with the model
            self._gathered = max(0, self._gathered - self._width * numel)

    def _add_to_bucket(self, numel: int) -> Allocated:
        """Add a gradient to the buffer, which is reduced first if it is full."""
        arriving = self._width * numel
        highest = Allocated(self._gradients + arriving, self._gathered + self._buffer)
        if self._filled and self._filled + numel > self._bucket:
            reducing = self._reduce()
            highest = choose_largest(highest, reducing._replace(gradients=reducing.gradients + arriving))
        if numel > self._bucket:
            self._gradients += self._width * numel
        self._filled += numel
        return highest

    def end(self) -> Allocated:
        """End the pass and return the most memory that was held."""
        highest = self._reduce()
        self._gathered = 0
        return highest

    def _limit(self) -> int:
        """Return the most bytes of gathered parameters; those that are used again soon stay gathered."""
        total = sum(self._units)
        return self._width * (total if 2 * total < _REUSE else min(total, _REUSE // 2 + self._bucket))

    def _gather(self, unit: int) -> Allocated:
        """Gather ``unit`` and the units after it, up to a bucket, into a buffer, and copy the parameters out of it.

        The embedding is alone in what runs first, so it is gathered without a buffer, and then what follows it.
        """
        alone = Allocated()
        if unit == 0:
            embedding, unit = self._units[0] * self._width, 1
            alone = Allocated(self._gradients, self._gathered + embedding * self._copies)
            self._gathered += embedding
        size = 0
        for following in range(unit, len(self._units)):
            if size and size + self._units[following] > self._bucket:
                break
            size += self._units[following]
            self._ahead = following
        self._buffer = size * self._width
        gathering = Allocated(self._gradients, self._gathered + self._buffer * self._copies)
        self._gathered = min(self._limit(), self._gathered + self._buffer)
        return choose_largest(alone, choose_largest(gathering, self.allocated))

    def _reduce(self) -> Allocated:
        """Sum the buffer over the ranks from a copy of it."""
        highest = Allocated(self._gradients, self._gathered + self._buffer, FP32 * self._filled * self._copies)
        self._filled = self._gradients = 0
        return highest


@lru_cache(maxsize=64)
def _count_sharded(inventory: Inventory) -> tuple[tuple[int, ...], tuple[int, ...], dict[tuple[int, str], int]]:
    """Return the number of partitioned elements of each unit, of its frozen ones, and of each parameter."""
    units, frozen = [0] * inventory.units, [0] * inventory.units
    cut = [w for w in inventory.weights if not is_persistent(w, inventory)]
    for weight in cut:
        units[weight.unit] += weight.numel
        if not weight.trainable:
            frozen[weight.unit] += weight.numel
    return tuple(units), tuple(frozen), {(w.unit, w.name): w.numel for w in cut}


def _count_frozen_before_blocks(inventory: Inventory) -> int:
    """Return the partitioned frozen elements that run before the blocks only, so that no backward pass needs them."""
    untied = any(len(w.shape) == 2 and w.unit == inventory.units - 1 for w in inventory.weights)
    first = (w for w in inventory.weights if w.unit == 0 and not w.trainable and not is_persistent(w, inventory))
    return sum(w.numel for w in first) if untied else 0


def is_persistent(weight: Weight, inventory: Inventory) -> bool:
    """Return whether zero3 keeps a parameter in full on every rank: if it is no larger than the largest vector."""
    return weight.numel <= _find_largest_vector(inventory)


@lru_cache(maxsize=64)
def _find_largest_vector(inventory: Inventory) -> int:
    return max((w.numel for w in inventory.weights if w.is_vector and not w.packed), default=0)


@lru_cache(maxsize=64)
def _estimate_lasting(inventory: Inventory, stage: int, shards: int, states: int, decay: bool) -> Mapping[str, int]:
    """Return the bytes held between steps, by purpose."""
    width, trained_elements = inventory.width, inventory.trained
    if stage < 3:
        local = _compute_partition(inventory, shards, decay)[0]
        return {
            "parameters": inventory.numel * width,
            "master weights": local * FP32,
            "optimizer state": local * FP32 * states,
            "gradients": trained_elements * FP32 if stage == 1 and width < FP32 else 0,
        }
    local = sum(-(-w.numel // shards) for w in inventory.trainable)
    frozen = sum(-(-w.numel // shards) for w in inventory.weights if not w.trainable)
    persistent = sum(w.numel for w in inventory.weights if is_persistent(w, inventory))
    return {
        "parameters": (local + frozen + persistent) * width,
        "master weights": local * FP32 if width < FP32 else 0,
        "optimizer state": local * FP32 * states,
        "gradients": local * FP32,
        "gradient buckets": choose_bucket(inventory) * FP32,
    }


@lru_cache(maxsize=64)
def _estimate_step(inventory: Inventory, stage: int, shards: int, on_gpu: bool, decay: bool) -> int:
    """Return the most bytes that an optimizer step needs in addition to those held between steps."""
    width = inventory.width
    if stage == 3:
        groups = _list_groups(inventory, decay)
        return FP32 * max((sum(-(-w.numel // shards) for w in group) for group in groups), default=0)
    local, touched_elements = _compute_partition(inventory, shards, decay)
    gathered_bytes = 0 if on_gpu else width * _count_largest_group(inventory, decay)
    if stage == 1 and width < FP32:
        return width * inventory.trained + gathered_bytes
    if width < FP32:
        return FP32 * local + gathered_bytes
    return FP32 * touched_elements + max(FP32 * local, gathered_bytes)
