"""Predict the seconds of a model's passes on one device from its traced operations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.machine.measured.calibration import Curve, InStep
from trainwright.machine.measured.calibration import ProcessRates as Speeds
from trainwright.planning.trace.units import FUSED, BatchShape, Operation, UnitTrace
from trainwright.planning.workload import MixedPrecision

if TYPE_CHECKING:
    from trainwright.planning.step_time.rates import ProductLayout

# A compiler fuses everything between two products into one kernel that reads its inputs and writes its outputs; the
# rest stays in registers. In a llama block (3,072 wide, its MLP 8,192) these are 149,000 numbers per token forward and
# backward: 11 for each number of the width, 2 of the keys and 3 of the MLP, then 12, 2 and 6. That is 22 % of the
# traffic of its single kernels.
_COMPILED_TRAFFIC, _COMPILED_KERNELS = 0.22, 0.22
_PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
LOSS = "loss"  # the name of operations that compute the loss from logits
# Precision to use instead if one was not measured: it computes it, or is equally fast.
_INSTEAD = {"fp4": "fp8", "fp8": "bf16", "fp16": "bf16", "bf16": "fp32", "fp32": "fp32", "tf32": "fp32"}


@dataclass(frozen=True)
class DeviceWork:
    """Seconds on the device by purpose, and the number of kernels that the host launches.

    ``traffic``: kernels bound by memory. ``loss``: the softmax over the vocabulary. ``host``: time of a CPU between its
    kernels.
    """

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    loss: float = 0.0
    host: float = 0.0
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds on the device, if a GPU's kernels run back to back."""
        return self.products + self.attention + self.traffic + self.loss + self.host

    def __add__(self, other: DeviceWork) -> DeviceWork:
        return DeviceWork(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.loss + other.loss,
            self.host + other.host,
            self.launches + other.launches,
        )

    def __sub__(self, other: DeviceWork) -> DeviceWork:
        return self + other * -1.0

    def __mul__(self, times: float) -> DeviceWork:
        parts = (self.products, self.attention, self.traffic, self.loss, self.host, self.launches)
        return DeviceWork(*(part * times for part in parts))


class Pricing:
    """Predict the time of the operations of one micro-batch on one device.

    ``speeds``: of the device, with all its processes at work. ``tf32``: fp32 products are computed in TF32.
    ``vocabulary``: the number of logits of a token. ``attended``: the share of the earlier tokens that a token attends
    to.
    """

    def __init__(
        self,
        speeds: Speeds,
        batch: BatchShape,
        precision: MixedPrecision,
        on_gpu: bool,
        vocabulary: int,
        tf32: bool = False,
        attended: float = 1.0,
    ) -> None:
        self.speeds = speeds
        self.vocabulary = vocabulary
        self.attended = attended
        self.batch = batch
        self.on_gpu = on_gpu
        self.precision = _PRECISION[precision]
        self.in_step = speeds.in_step.get(self.precision) or speeds.in_step.get("fp32", InStep())
        # Precision of products by the bytes of their results.
        half = "bf16" if self.precision == "fp32" else self.precision
        self._names = {4: "tf32" if tf32 else "fp32", 2: half, 1: "fp8", 0.5: "fp4"}
        self._attention: dict[tuple[bool, int], float] = {}
        self._traffic: dict[tuple[str, int], float] = {}

    def work(self, operations: Iterable[Operation[int]], *, backward: bool, compiled: bool = False) -> DeviceWork:
        """Return the work of ``operations``, all of a forward or all of a backward pass."""
        products = attention = traffic = expansion = 0.0
        unfused = fusible = 0
        for operation in operations:
            if operation.kind == "product":
                products += self._estimate_products(operation, backward)
                unfused += operation.launches
            elif operation.kind == "attention":
                per_operation = self._compute_seconds_per_operation(backward, operation.generation)
                attention += self.attended * operation.flops * per_operation
                unfused += operation.launches
            elif operation.name == LOSS:
                fusible += operation.launches  # counted as a whole, by the number of logits
            elif operation.launches:
                size = round((operation.read + operation.written) / operation.launches)
                seconds = operation.launches * self.traffic(operation.kind, size)
                if operation.kind == "expansion" or operation.name == FUSED:
                    expansion += seconds
                    unfused += operation.launches
                else:
                    traffic += seconds
                    fusible += operation.launches
        if compiled:
            traffic *= _COMPILED_TRAFFIC
        launches = unfused + fusible * (_COMPILED_KERNELS if compiled else 1.0)
        more = self.in_step
        return DeviceWork(
            more.products * products,
            more.attention * attention,
            more.traffic * (traffic + expansion),
            0.0,
            more.host * launches,
            launches,
        )

    def price_unit(self, unit: UnitTrace[int]) -> DeviceWork:
        """Return the work of both directions of a unit."""
        backward_work = self.work(unit.backward.operations, backward=True)
        return self.work(unit.forward.operations, backward=False) + backward_work

    def traffic(self, kind: str, size: int, precision: str | None = None) -> float:
        """Return the seconds of a kernel that reads and writes ``size`` bytes."""
        key = kind, size
        if key not in self._traffic:
            self._traffic[key] = self.curve("traffic", precision or self.precision, kind).seconds(size)
        return self._traffic[key]

    def logits(self, count: float) -> float:
        """Return the seconds of the loss of ``count`` logits, with its gradient."""
        return self.curve("loss", self.precision).seconds(count)

    def curve(self, group: str, precision: str, last: str | None = None) -> Curve:
        """Return a curve of the device in ``precision``, or in its substitute."""
        end = "" if last is None else f"/{last}"
        if last == "expansion" and f"{group}/{precision}{end}" not in self.speeds.curves:  # not measured separately
            end = "/elementwise"
        while (curve := self.speeds.curves.get(f"{group}/{precision}{end}")) is None:
            assert precision != "fp32", f"no rates of {group}"
            precision = _INSTEAD[precision] if self.on_gpu else "fp32"
        return curve

    def _estimate_products(self, operation: Operation[int], backward: bool) -> float:
        """Return the seconds of all launches, of which the sizes may be those of the largest only."""
        largest = 2 * operation.m * operation.n * operation.k * operation.times * operation.launches
        share = min(1.0, operation.flops / max(1, largest))
        return operation.launches * self._estimate_product(operation, backward) * share

    def _estimate_product(self, operation: Operation[int], backward: bool) -> float:
        """Return the seconds of one launch."""
        precision = self._names.get(operation.width, self.precision)
        curve = self.curve("product", precision, self._choose_layout(operation, backward))
        if operation.times == 1 or not operation.name:  # those of a batch, such as of heads, fill a device together
            return curve.seconds(operation.times * operation.m, operation.n, operation.k)
        # Many small products, such as of experts, are one kernel.
        once = curve.seconds(0, 0, 0)
        return once + operation.times * (curve.seconds(operation.m, operation.n, operation.k) - once)

    def _choose_layout(self, operation: Operation[int], backward: bool) -> ProductLayout:
        """Return which operands are transposed: ``name`` is that of the parameter that a product reads, if any."""
        if operation.times > 1 and operation.name and f"product/{self.precision}/grouped" in self.speeds.curves:
            return "grouped"
        if not operation.name and operation.times == 1 and operation.m != self.batch.tokens:
            return "weight"  # a gradient: the product of two activations
        # The gradient of what enters the head is computed in the forward pass, with that of the loss.
        return "input" if backward or operation.k == self.vocabulary else "forward"

    def _compute_seconds_per_operation(self, backward: bool, generation: int) -> float:
        """Return the seconds per operation of attention by a generation of FlashAttention."""
        key = backward, generation
        if key not in self._attention:
            self._attention[key] = self._estimate_attention(backward, generation)
        return self._attention[key]

    def _estimate_attention(self, backward: bool, generation: int) -> float:
        """Compute the seconds: 2 products of the pairs forward and 5 backward, 2 operations per pair and channel."""
        direction, products = ("backward", 5) if backward else ("forward", 2)
        curve_name = f"{direction}{'' if generation == 2 else generation}"
        # Measured with the kernel that runs.
        if not any(name.endswith(f"/{curve_name}") for name in self.speeds.curves):
            curve_name = direction
        curve = self.curve("attention", self.precision, curve_name)
        seconds = sum(count * length * curve.seconds(length) for length, count in self.batch.sequences)
        operations = sum(count * length * products * (length + 1) for length, count in self.batch.sequences)
        return seconds / max(1, operations)
