"""Predict the time of a step besides its passes: gradient accumulation and clipping, the optimizer, offloading, data.

Follows parallel/: replicated.py and gradients.py (single, ddp), fsdp.py, zero.py. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.parallel.constants import CACHED_ELEMENTS
from trainwright.parallel.matrices.owners import ITERATIONS, assign, slowest
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.step_time.work import Pricing
from trainwright.planning.workload import Choice

_FP32 = 4


@dataclass(frozen=True)
class Update:
    """Predict the time of a process's update of ``trainable`` of the model's ``parameters``.

    ``matrices``: number of tensors. ``width``: bytes per element in computation. ``orthogonalized``: shapes of
    the matrices that Muon updates.
    """

    choice: Choice
    pricing: Pricing
    parameters: int
    trainable: int
    matrices: int
    width: int
    orthogonalized: tuple[tuple[int, int], ...]
    stack: Stack = OWN

    @property
    def kept(self) -> int:
        """Bytes per element of trained weights and accumulated gradients between steps."""
        return max(self.width, self.stack.kept)

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
        norm = self._norm(self.owned)
        clip = self._traffic("elementwise", 2 * self.kept * self.owned)
        numbers = self.owned
        if self.stack != OWN:  # the curve is of 4-byte numbers: three per weight and gradient, four of its state
            numbers *= (3 * self.kept + 4 * self.stack.state_bytes) / (7 * _FP32)
        update = self.pricing.speeds.curves["host_optimizer" if self._leaves_gpu else "optimizer"].seconds(numbers)
        return norm + clip + update + self._casts() + self._orthogonalizing()

    def _orthogonalizing(self) -> float:
        """Return the seconds of Muon's products, on the rank with the most of them in each round."""
        curve = self.pricing.curve("product", "bf16" if self.pricing.on_gpu else "fp32", "forward")
        seconds = {}
        for rows, columns in set(self.orthogonalized):
            low, high = sorted((rows, columns))
            once = curve.seconds(low, low, high) + curve.seconds(low, low, low) + curve.seconds(low, high, low)
            seconds[rows, columns] = ITERATIONS * once
        rounds = assign(self.orthogonalized, self.choice.num_processes)
        return slowest(rounds, [seconds[shape] for shape in self.orthogonalized])

    def keeping(self) -> float:
        """Return the seconds of a step for accumulating gradients and copying them for the exchange."""
        choice, passes = self.choice, self.choice.gradient_accumulation_steps
        whole, width = self.trainable, self.width
        kept = self.kept
        summed = self._traffic("elementwise", 3 * kept * whole)
        if not choice.spec.shards:
            if width == kept:  # autograd accumulates in place
                seconds = (passes - 1) * summed
            else:
                first = self._traffic("elementwise", (width + kept) * whole)
                later = self._traffic("elementwise", (width + 2 * kept) * whole)
                seconds = 0.0 if passes == 1 else first + (passes - 1) * later
            if choice.spec.collectives:
                seconds += self._traffic("copy", (width + self.stack.exchanged) * whole)
            return seconds
        if not choice.spec.shards_parameters:
            return passes * self._traffic("copy", (width + self.stack.exchanged) * whole)
        return passes * self._sharded_copies()

    def offload(self, kept: int, forward: float, backward: float, blocks: int) -> float:
        """Return the seconds that copies between the devices and the host's memory add to a step.

        ``kept``: bytes of activations of ``blocks`` blocks that are offloaded per micro-batch, during ``forward``
        seconds of computation, and copied back during ``backward`` seconds.
        """
        if not self.pricing.on_gpu:
            return 0.0
        choice, passes, seconds = self.choice, self.choice.gradient_accumulation_steps, 0.0
        if choice.activation_offload:
            # Copied during the computation, but for those of the last block, which are needed at once.
            last = self._host("to", kept / max(1, blocks if self.stack.fetches_ahead else 1))
            back = last + max(0.0, self._host("to", kept) - last - backward)
            seconds += passes * (max(0.0, self._host("from", kept) - forward) + back)
        if choice.offload_parameters:
            kept = self.width if choice.spec.separate_masters else self.kept
            shard = (kept * self.trainable + self.width * (self.parameters - self.trainable)) / choice.shards
            times = 2 if choice.reshard_after_forward else 1
            seconds += passes * times * self._host("to", shard)
        if self.on_host:
            seconds += passes * self._host("from", self.stack.exchanged * self.owned)
            if choice.spec.separate_masters:
                seconds += self._host("to", self.width * self.owned)
        return seconds

    @property
    def _leaves_gpu(self) -> bool:
        return self.on_host and self.pricing.on_gpu

    def _casts(self) -> float:
        """Return the seconds of casts between fp32 master weights and the computing weights, if a process has both."""
        spec = self.choice.spec
        if self.width == self.kept or not spec.separate_masters:
            return 0.0
        given = self._traffic("copy", (self.width + self.kept) * self.owned)
        summed = bool(spec.collectives) or self.choice.gradient_accumulation_steps > 1
        if not spec.shards and not summed:
            return given + self._traffic("copy", (self.width + self.kept) * self.owned)  # of gradients
        return given

    def _norm(self, elements: float) -> float:
        if self.pricing.on_gpu:
            return self._traffic("reduction", self.kept * elements)
        # In pieces that stay in the cache: copied, squared, summed.
        piece = self.pricing.traffic("copy", 2 * _FP32 * CACHED_ELEMENTS, "fp32")
        piece += self.pricing.traffic("elementwise", 2 * _FP32 * CACHED_ELEMENTS, "fp32")
        piece += self.pricing.traffic("reduction", _FP32 * CACHED_ELEMENTS, "fp32")
        return piece * elements / CACHED_ELEMENTS

    def _sharded_copies(self) -> float:
        """Return the seconds of copying gathered parameters and gradients, per micro-batch of FSDP and ZeRO-3."""
        choice, width = self.choice, self.width
        gathers = 2 if choice.reshard_after_forward else 1
        kept = self.kept
        cast = self._traffic("copy", (kept + width) * self.trainable / choice.shards) if width != kept else 0.0
        placed = self._traffic("copy", 2 * width * self.parameters)
        laid_out = self._traffic("copy", (width + self.stack.exchanged) * self.trainable)
        added = self._traffic("elementwise", 3 * kept * self.owned)
        return gathers * (cast + placed) + laid_out + added

    def _traffic(self, kind: str, size: float) -> float:
        """Return the seconds for ``size`` bytes read and written over all tensors, at their mean size."""
        each = self.pricing.traffic(kind, round(size / self.matrices), "fp32")
        return self.matrices * (each + self.pricing.in_step.host)

    def _host(self, direction: str, size: float) -> float:
        return self.pricing.speeds.curves[f"host/{direction}"].seconds(size) if size else 0.0
