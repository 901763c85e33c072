"""Predict the seconds of a model's passes on one device from its kernels. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.machine.measured.calibration import Curve, InStep
from trainwright.machine.measured.calibration import ProcessRates as Speeds
from trainwright.planning.operations import BatchShape, Kernel, Pass
from trainwright.planning.stack import OWN, Stack
from trainwright.planning.workload import MixedPrecision

if TYPE_CHECKING:
    from trainwright.planning.step_time.rates import ProductLayout

# A compiler fuses everything between two products into one kernel that reads its inputs and writes its outputs; the
# rest stays in registers. In a llama block (3,072 wide, its MLP 8,192) these are 149,000 numbers per token forward and
# backward: 11 for each number of the width, 2 of the keys and 3 of the MLP, then 12, 2 and 6. That is 22 % of the
# traffic of its single kernels.
_COMPILED_TRAFFIC, _COMPILED_KERNELS = 0.22, 0.22
# Bytes per bf16 logit that other programs move, of the 44 of this program's chunks (rates.py): fused kernels
# read it twice and write its gradient; torch's cross_entropy makes an fp32 copy, log-probabilities, zeros, and two
# gradients.
_FUSED_LOSS, _FULL_LOSS = 8 / 44, 38 / 44
_PRECISION = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
# Precision to use instead if one was not measured: it computes it, or is equally fast.
_INSTEAD = {"fp16": "bf16", "bf16": "fp32", "fp32": "fp32", "tf32": "fp32"}


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
    """Predict the time of the kernels of one micro-batch on one device.

    ``speeds``: of the device, with all its processes at work. ``tf32``: fp32 products are computed in TF32.
    """

    def __init__(
        self,
        speeds: Speeds,
        batch: BatchShape,
        precision: MixedPrecision,
        on_gpu: bool,
        stack: Stack = OWN,
        tf32: bool = False,
    ) -> None:
        self.speeds = speeds
        self.stack = stack
        self.batch = batch
        self.on_gpu = on_gpu
        self.precision = _PRECISION[precision]
        self.in_step = speeds.in_step.get(self.precision) or speeds.in_step.get("fp32", InStep())
        # Precision of products by the bytes of their results.
        self._names = {
            4: "tf32" if tf32 else "fp32",
            2: self.precision if self.precision != "fp32" else "bf16",
            1: self.precision,
        }
        self._attention: dict[tuple[bool, int], float] = {}
        self._traffic: dict[tuple[str, int], float] = {}

    def work(self, kernels: Iterable[Kernel], *, backward: bool, compiled: bool = False) -> DeviceWork:
        """Return the work of ``kernels``, all of a forward or all of a backward pass."""
        products = attention = traffic = elementwise = 0.0
        many = few = 0
        for kernel in kernels:
            if kernel.kind == "product":
                products += self._product(kernel, backward)
                many += 1
            elif kernel.kind == "attention":
                attention += kernel.flops * self._seconds_per_operation(backward, kernel.generation)
                many += 1
            elif kernel.operation == "loss":
                few += 1  # counted as a whole, by the number of logits
            elif kernel.kind == "expansion" or (kernel.operation == "dispatch" and self.stack.experts == "permuted"):
                elementwise += self.traffic(kernel.kind, kernel.read + kernel.written)
                many += 1
            else:
                traffic += self.traffic(kernel.kind, kernel.read + kernel.written)
                few += 1
        if compiled:
            traffic *= _COMPILED_TRAFFIC
        launches = many + few * (_COMPILED_KERNELS if compiled else 1.0)
        more = self.in_step
        return DeviceWork(
            more.products * products,
            more.attention * attention,
            more.traffic * (traffic + elementwise),
            0.0,
            more.host * launches,
            launches,
        )

    def pass_and_back(self, part: Pass) -> DeviceWork:
        """Return the work of both directions of a part of a model."""
        return self.work(part.forward, backward=False) + self.work(part.backward, backward=True)

    def traffic(self, kind: str, size: int, precision: str | None = None) -> float:
        """Return the seconds of a kernel that reads and writes ``size`` bytes."""
        key = kind, size
        if key not in self._traffic:
            self._traffic[key] = self.curve("traffic", precision or self.precision, kind).seconds(size)
        return self._traffic[key]

    def logits(self, count: float) -> float:
        """Return the seconds of the loss of ``count`` logits, with its gradient."""
        seconds = self.curve("loss", self.precision).seconds(count)
        if self.stack == OWN:
            return seconds
        one_kernel = self.stack.loss in ("fused", "widened") or self.stack.compiles_loss
        return seconds * (_FUSED_LOSS if one_kernel else 1.0 if self.stack.loss == "chunked" else _FULL_LOSS)

    def curve(self, group: str, precision: str, last: str | None = None) -> Curve:
        """Return a curve of the device in ``precision``, or in its substitute."""
        end = "" if last is None else f"/{last}"
        if last == "expansion" and f"{group}/{precision}{end}" not in self.speeds.curves:  # not measured separately
            end = "/elementwise"
        while (curve := self.speeds.curves.get(f"{group}/{precision}{end}")) is None:
            assert precision != "fp32", f"no rates of {group}"
            precision = _INSTEAD[precision] if self.on_gpu else "fp32"
        return curve

    def _product(self, kernel: Kernel, backward: bool) -> float:
        m, n, k, count = kernel.m, kernel.n, kernel.k, kernel.times
        width = kernel.written // max(1, m * n * count)
        curve = self.curve("product", self._names.get(width, self.precision), self._layout(kernel, backward))
        if count == 1:
            return curve.seconds(m, n, k)
        # Many small products are one kernel.
        once = curve.seconds(0, 0, 0)
        return once + count * (curve.seconds(m, n, k) - once)

    def _layout(self, kernel: Kernel, backward: bool) -> ProductLayout:
        if kernel.times > 1 and f"product/{self.precision}/grouped" in self.speeds.curves:
            return "grouped"
        rows = self.batch.targets if kernel.operation == "head" else self.batch.tokens
        if kernel.k == rows or kernel.m > rows >= kernel.k:
            return "weight"
        if kernel.operation == "head":
            return "forward" if kernel.n > kernel.k else "input"
        return "input" if backward else "forward"

    def _seconds_per_operation(self, backward: bool, generation: int) -> float:
        """Return the seconds per operation of attention by a generation of FlashAttention."""
        key = backward, generation
        if key not in self._attention:
            self._attention[key] = self._of_attention(backward, generation)
        return self._attention[key]

    def _of_attention(self, backward: bool, generation: int) -> float:
        """Compute the seconds: 2 products of the pairs forward and 5 backward, 2 operations per pair and channel."""
        direction, products = ("backward", 5) if backward else ("forward", 2)
        which = generation if self.stack.attention == 2 else self.stack.attention
        named = f"{direction}{'' if which == 2 else which}"
        if not any(name.endswith(f"/{named}") for name in self.speeds.curves):  # measured with the kernel that runs
            named = direction
        curve = self.curve("attention", self.precision, named)
        ranks = self.stack.sequence_parallel  # each has a part of the positions, which attend to all
        seconds = sum(count * length * curve.seconds(length * ranks) for length, count in self.batch.sequences)
        operations = sum(count * length * products * (length + 1) for length, count in self.batch.sequences)
        return seconds / max(1, operations)
