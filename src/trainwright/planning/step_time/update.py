"""Predict the time of a step besides its passes: gradient accumulation and clipping, the optimizer, offloading, data.

The schedules are those of parallel/: replicated.py (single, ddp), fsdp.py on torch's FSDP2, zero.py on DeepSpeed.
Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap

from trainwright.parallel.constants import CACHED_ELEMENTS
from trainwright.parallel.matrix_owners import ITERATIONS, assign_matrices, group_into_stacks
from trainwright.planning.step_time.rates import CollectiveKind, Group, Rates
from trainwright.planning.step_time.work import Pricing
from trainwright.planning.workload import Choice
from trainwright.recipe.optimizer_spec import REFRESHED, list_preconditioned_sides

_FP32 = 4
LAUNCHES_OF_STACK = 22  # of kernels for matrices that Muon updates together, counted by bench/launches.py
# Of SOAP: for each side the preconditioner, the gradient and its mean in the basis, and the update back from it; of
# squares, to refresh a basis, one and a QR decomposition, which has the operations of 4/3 products.
_PRODUCTS_OF_SIDE, _PRODUCTS_OF_BASIS = 4, 1 + 4 / 3


@dataclass(frozen=True)
class Update:
    """Predict the time of a process's update of ``trainable`` of the model's ``parameters``.

    ``matrices``: number of tensors. ``width``: bytes per element in computation. ``orthogonalized``: shapes of
    the matrices that Muon updates; ``bases``: of those that SOAP updates. ``relative``: seconds of an update relative
    to AdamW's.
    """

    choice: Choice
    pricing: Pricing
    parameters: int
    trainable: int
    matrices: int
    width: int
    orthogonalized: tuple[tuple[int, int], ...]
    relative: float = 1.0
    bases: tuple[tuple[int, int], ...] = ()

    @property
    def width_between_steps(self) -> int:
        """Bytes per element of trained weights and accumulated gradients between steps."""
        return max(self.width, _FP32)

    @property
    def owned(self) -> float:
        """Elements whose optimizer state this process holds."""
        return self.trainable / self.choice.shards

    @property
    def on_host(self) -> bool:
        """Whether the update runs in the host's memory."""
        return "optimizer state" in self.choice.offloaded

    def optimizer(self) -> float:
        """Return the seconds of a step from exchanged gradients to updated weights."""
        norm = self._estimate_norm(self.owned)
        clip = self._traffic("elementwise", 2 * self.width_between_steps * self.owned)
        curve = self.pricing.speeds.curves["host_optimizer" if self.on_host and self.pricing.on_gpu else "optimizer"]
        update = self.relative * curve.seconds(self.owned)
        seconds = norm + clip + update + self._estimate_casts()
        return seconds + self._estimate_orthogonalization() + self._estimate_preconditioning()

    def _estimate_orthogonalization(self) -> float:
        """Return the seconds of Muon's products, on the rank with the most of them in each round."""
        shapes, ranks, on_gpu = self.orthogonalized, self.choice.num_processes, self.pricing.on_gpu
        rounds = assign_matrices(shapes, ranks, on_gpu=on_gpu) if ranks > 1 else ((tuple(range(len(shapes))),),)
        iterations, launching = cache(self._estimate_iterations), LAUNCHES_OF_STACK * self.pricing.speeds.launch

        def seconds(owned: tuple[int, ...]) -> float:
            mine = [shapes[index] for index in owned]
            together = [(mine[indices[0]], len(indices)) for indices in group_into_stacks(mine, on_gpu=on_gpu)]
            return max(sum(starmap(iterations, together)), launching * len(together))

        return sum(max(map(seconds, owners)) for owners in rounds)

    def _estimate_preconditioning(self) -> float:
        """Return the seconds of SOAP's products in fp32, of which every process computes all."""
        curve, seconds = self.pricing.curve("product", "fp32", "forward"), 0.0
        for (rows, columns), count in Counter(self.bases).items():
            for side, other_side in ((rows, columns), (columns, rows)):
                if list_preconditioned_sides((side,)):
                    refresh_seconds = _PRODUCTS_OF_BASIS * curve.seconds(side, side, side) / REFRESHED
                    seconds += count * (_PRODUCTS_OF_SIDE * curve.seconds(other_side, side, side) + refresh_seconds)
        return seconds

    def _estimate_iterations(self, shape: tuple[int, int], together: int) -> float:
        """Return the seconds of Muon's products of matrices of a shape."""
        curve = self.pricing.curve("product", "bf16" if self.pricing.on_gpu else "fp32", "forward")
        low, high = sorted(shape)
        rows = together * low
        once = curve.seconds(rows, low, high) + curve.seconds(rows, low, low) + curve.seconds(rows, high, low)
        return ITERATIONS * once

    def estimate_accumulation(self) -> float:
        """Return the seconds of a step for accumulating gradients and copying them for the exchange."""
        choice, passes = self.choice, self.choice.gradient_accumulation_steps
        elements, width = self.trainable, self.width
        master_width = self.width_between_steps
        sum_seconds = self._traffic("elementwise", 3 * master_width * elements)
        if not choice.spec.shards:
            if width == master_width:  # autograd accumulates in place
                seconds = (passes - 1) * sum_seconds
            else:
                first = self._traffic("elementwise", (width + master_width) * elements)
                later = self._traffic("elementwise", (width + 2 * master_width) * elements)
                seconds = 0.0 if passes == 1 else first + (passes - 1) * later
            if choice.spec.collectives:
                seconds += self._traffic("copy", (width + _FP32) * elements)
            return seconds
        if not choice.spec.shards_parameters:
            return passes * self._traffic("copy", (width + _FP32) * elements)
        return passes * self._estimate_sharded_copies()

    def offload(self, activation_bytes: int, forward: float, backward: float, blocks: int) -> float:
        """Return the seconds that copies between the devices and the host's memory add to a step.

        ``activation_bytes``: bytes of activations of ``blocks`` blocks that are offloaded per micro-batch, during
        ``forward`` seconds of computation, and copied back during ``backward`` seconds.
        """
        if not self.pricing.on_gpu:
            return 0.0
        choice, passes, seconds = self.choice, self.choice.gradient_accumulation_steps, 0.0
        if choice.activation_offload:
            # Copied during the computation, but for those of the last block, which are needed at once.
            last = self._host("to", activation_bytes / max(1, blocks))
            copied_back = last + max(0.0, self._host("to", activation_bytes) - last - backward)
            seconds += passes * (max(0.0, self._host("from", activation_bytes) - forward) + copied_back)
        if choice.offload_parameters:
            width = self.width if choice.spec.separate_masters else self.width_between_steps
            shard = (width * self.trainable + self.width * (self.parameters - self.trainable)) / choice.shards
            times = 2 if choice.reshard_after_forward else 1
            seconds += passes * times * self._host("to", shard)
        if self.on_host:
            seconds += passes * self._host("from", _FP32 * self.owned)
            if choice.spec.separate_masters:
                seconds += self._host("to", self.width * self.owned)
        return seconds

    def _estimate_casts(self) -> float:
        """Return the seconds of casts between fp32 master weights and the computing weights, if a process has both."""
        spec = self.choice.spec
        if self.width == self.width_between_steps or not spec.separate_masters:
            return 0.0
        cast_seconds = self._traffic("copy", (self.width + self.width_between_steps) * self.owned)
        summed = bool(spec.collectives) or self.choice.gradient_accumulation_steps > 1
        return cast_seconds if spec.shards or summed else 2 * cast_seconds  # of gradients, too

    def _estimate_norm(self, elements: float) -> float:
        if self.pricing.on_gpu:
            return self._traffic("reduction", self.width_between_steps * elements)
        # In pieces that stay in the cache: copied, squared, summed.
        piece = self.pricing.traffic("copy", 2 * _FP32 * CACHED_ELEMENTS, "fp32")
        piece += self.pricing.traffic("elementwise", 2 * _FP32 * CACHED_ELEMENTS, "fp32")
        piece += self.pricing.traffic("reduction", _FP32 * CACHED_ELEMENTS, "fp32")
        return piece * elements / CACHED_ELEMENTS

    def _estimate_sharded_copies(self) -> float:
        """Return the seconds of copying gathered parameters and gradients, per micro-batch of FSDP and ZeRO-3."""
        choice, width = self.choice, self.width
        gathers = 2 if choice.reshard_after_forward else 1
        master_width = self.width_between_steps
        cast = 0.0
        if width != master_width:
            cast = self._traffic("copy", (master_width + width) * self.trainable / choice.shards)
        copy_seconds = self._traffic("copy", 2 * width * self.parameters)
        laid_out = self._traffic("copy", (width + _FP32) * self.trainable)
        add_seconds = self._traffic("elementwise", 3 * master_width * self.owned)
        return gathers * (cast + copy_seconds) + laid_out + add_seconds

    def _traffic(self, kind: str, size: float) -> float:
        """Return the seconds for ``size`` bytes read and written over all tensors, at their mean size."""
        seconds = self.pricing.traffic(kind, round(size / self.matrices), "fp32")
        return self.matrices * (seconds + self.pricing.in_step.host)

    def _host(self, direction: str, size: float) -> float:
        return self.pricing.speeds.curves[f"host/{direction}"].seconds(size) if size else 0.0


_SMALL = 64  # bytes that processes exchange after every step


@dataclass(frozen=True)
class UnitWork:
    """A part of the model that is gathered and reduced as one: a block, or everything outside the blocks.

    ``forward``, ``backward``: seconds of computation per micro-batch.
    """

    parameters: int
    trainable: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Exchange:
    """Predict the time of a choice's collectives.

    ``hidden``: the share of a collective that can overlap with computation. ``matrices``: of a block, each of which
    DeepSpeed gathers separately; its hooks around every module take Python time.
    """

    choice: Choice
    rates: Rates
    width: int
    devices_per_node: int
    hidden: float
    matrices: int

    def estimate_exposed(self, units: Sequence[UnitWork]) -> float:
        """Return the seconds of a step in which a device waits for others. ``units``: that outside the blocks first."""
        choice = self.choice
        if choice.num_processes == 1:
            return 0.0
        passes, small_exchanges = choice.gradient_accumulation_steps, self._all("all_gather", _SMALL)
        if choice.spec.shards:
            small_exchanges += self._all("all_reduce", _SMALL)  # the norm of sharded gradients
        seconds = small_exchanges
        for collective in choice.spec.collectives:
            if collective.when == "buckets":
                seconds += self._buckets(units)
            elif collective.when != "passes":
                width = self.width if collective.of == "parameters" else _FP32
                times = passes if collective.when == "micro-batch" else 1
                seconds += times * self._all(collective.kind, width * sum(unit.trainable for unit in units))
        if all(collective.when != "passes" for collective in choice.spec.collectives):
            return seconds
        shard_seconds = self._sharded(units)
        if choice.replicate_size > 1:
            shard_seconds += self._estimate_over_replicas(units)
        return seconds + shard_seconds

    def estimate_updates(self, matrices: tuple[tuple[int, int], ...], width: int) -> float:
        """Return the seconds of exchanging ``matrices`` and their updates, in elements of ``width`` bytes.

        See parallel/matrix_exchange.py.
        """
        choice, shards = self.choice, self.choice.shards
        if choice.num_processes == 1 or not matrices:
            return 0.0
        seconds = 0.0
        for owners in assign_matrices(matrices, choice.num_processes, on_gpu=width < _FP32):
            sizes = [width * sum(matrices[n][0] * matrices[n][1] for n in indices) for indices in owners]
            replicas = [sum(sizes[begin : begin + shards]) for begin in range(0, len(sizes), shards)]
            # In an all-to-all a rank sends each of the others its part; in an all-gather it passes all parts on.
            seconds += 2 * self.rates.collective("all_gather", max(replicas) / shards, self._build_group(shards))
            for size in replicas:
                seconds += self.rates.collective("broadcast", size / shards, self._replicas())
        return seconds

    def _replicas(self) -> Group:
        """Return the group of the ranks that hold the same shards."""
        choice = self.choice
        replicas = choice.num_processes // choice.shards
        inside = min(replicas, max(1, min(choice.num_processes, self.devices_per_node) // choice.shards))
        return Group(-(-replicas // inside), inside)

    def _all(self, kind: CollectiveKind, size: float) -> float:
        return self.rates.collective(kind, size, self._build_group(self.choice.num_processes))

    def _build_group(self, ranks: int) -> Group:
        """Return a group of ``ranks`` neighboring ranks."""
        inside = min(ranks, self.devices_per_node)
        return Group(-(-ranks // inside), inside)

    def _buckets(self, units: Sequence[UnitWork]) -> float:
        """Return the exposed seconds of reducing gradients in buckets during the last micro-batch's backward pass.

        Gradients outside the blocks come last, with no computation left to overlap.
        """
        last, other_bytes = _FP32 * units[0].trainable, _FP32 * sum(unit.trainable for unit in units[1:])
        bucket = self.choice.spec.bucket_bytes or max(1, other_bytes)
        buckets, rest = divmod(other_bytes, bucket)
        before = buckets * self._all("all_reduce", bucket) + self._all("all_reduce", rest)
        computing = sum(unit.backward for unit in units[1:])
        return before - self.hidden * min(before, computing) + self._all("all_reduce", last)

    def _sharded(self, units: Sequence[UnitWork]) -> float:
        choice = self.choice
        group = self._build_group(choice.shards)
        messages = self.matrices if choice.spec.hooks_modules else 1

        def gathered(unit: UnitWork) -> float:
            return messages * self.rates.collective("all_gather", unit.parameters * self.width / messages, group)

        def scattered(unit: UnitWork) -> float:
            return self.rates.collective("reduce_scatter", _FP32 * unit.trainable, group)

        gathers, scatters = [gathered(unit) for unit in units], [scattered(unit) for unit in units]
        forward = self._forward(units, gathers)
        if not choice.reshard_after_forward:
            # Gathered and reduced once per step.
            return forward + self._backward(units, [0.0] * len(units), scatters)
        # Parameters outside the blocks stay gathered until the end of the backward pass.
        backward = self._backward(units, [0.0, *gathers[1:]], scatters)
        passes = choice.gradient_accumulation_steps
        return passes * (forward + backward)

    def _forward(self, units: Sequence[UnitWork], gathers: Sequence[float]) -> float:
        """Return the exposed seconds of the forward pass: each unit is gathered while the previous one computes."""
        waiting = gathers[0]
        for before, gather in zip(units, gathers[1:], strict=False):
            waiting += self._compute_uncovered(gather, before.forward)
        return waiting

    def _backward(self, units: Sequence[UnitWork], gathers: Sequence[float], scatters: Sequence[float]) -> float:
        """Return the exposed seconds of the backward pass.

        While a unit computes, the previous unit is gathered and the gradients of the next one are reduced.
        """
        last = len(units) - 1
        waiting = gathers[last] + scatters[0]
        for index in range(last, 0, -1):
            gather = gathers[index - 1] if index > 1 else 0.0
            scatter = scatters[index + 1] if index < last else 0.0
            waiting += self._compute_uncovered(gather + scatter, units[index].backward)
        return waiting + self._compute_uncovered(scatters[1] if last else 0.0, units[0].backward)

    def _compute_uncovered(self, exchanging: float, computing: float) -> float:
        """Return the seconds that communication adds to simultaneous computation."""
        return exchanging - self.hidden * min(exchanging, computing)

    def _estimate_over_replicas(self, units: Sequence[UnitWork]) -> float:
        """Return the exposed seconds of all-reducing gradient shards over replicas, after the last reduce-scatters."""
        sizes = [_FP32 * unit.trainable / self.choice.shards for unit in units]
        sums = [self.rates.collective("all_reduce", size, self._replicas()) for size in sizes]
        return self._backward(units, [0.0] * len(units), sums)
