"""Rates of a machine for training: from its calibration, or its quick measurement, or its datasheets.

All have the form of the same curves (``machine.measured.calibration.ProcessRates``). Imports no torch.

Every constant is a physical effect with its source next to it; none is fitted to a single run. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from trainwright.machine.catalog import Card
from trainwright.machine.describe import Cluster
from trainwright.machine.links import Link
from trainwright.machine.measured.calibration import (
    FORMS,
    Calibration,
    Curve,
    Exchanged,
    InStep,
    ProcessRates,
    TimedSample,
)
from trainwright.planning.step_time.basis import (
    build_measured_setting,
    find_peak_rate,
    list_thread_counts,
    scale_to_measured_blocks,
)

ProductLayout = Literal["forward", "input", "weight", "grouped"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]

# Share of a link's rate that large messages reach (all-gathers of NCCL: 361 of 450 GB/s over NVLink 4, 235 of 300 over
# NVLink 3, 313 of 448 over Infinity Fabric; 46 to 48 of 50 GB/s through an InfiniBand adapter, less with many nodes:
# github.com/stas00/ml-engineering, network; github.com/NVIDIA/nccl-tests/issues/290 and /119).
_LINK = {"nvlink": 0.8, "infinity_fabric": 0.7, "ethernet": 0.7, "pcie": 0.7, "network": 0.75, "memory": 0.5}
_THROUGH_HOST = 0.35  # share of a slot's rate if devices cannot write into each other's memory
# Start-up time of an NCCL collective in addition to its steps (all-reduce of 1 MiB on 8 H200: 46 us).
_START = 25e-6


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: ``nodes`` nodes with ``per_node`` ranks each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Rates:
    """Rates of ``cluster``; ``calibration`` and ``measurement`` are of it. ``cache``: results computed from them."""

    cluster: Cluster
    calibration: Calibration | None = None
    measurement: Calibration | None = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _settings: dict[tuple[int, int | None], ProcessRates] = field(default_factory=dict, repr=False, compare=False)

    @property
    def are_measured(self) -> bool:
        """Whether the rates were measured on this machine."""
        return self.calibration is not None or self.measurement is not None

    def setting(self, processes: int, threads: int | None = None) -> ProcessRates:
        """Return the rates of each of ``processes`` that run at once on a node.

        ``threads``: threads per process on a CPU, by default all available.
        """
        if self.cluster.device == "cpu" and threads is None:
            threads = max(1, self.cluster.cpu_cores // processes)
        key = processes, threads
        if key not in self._settings:
            self._settings[key] = self._setting(*key)
        return self._settings[key]

    def _setting(self, processes: int, threads: int | None) -> ProcessRates:
        if (calibration := self.calibration) is not None:
            nearest = calibration.nearest(processes)
            if self.measurement is None:
                return nearest
            return scale_to_measured_blocks(nearest, self.measurement, lambda number, _: calibration.nearest(number))
        if self.measurement is not None:
            return scale_to_measured_blocks(self._measured(processes, threads), self.measurement, self._measured)
        return build_nominal_setting(self.cluster, processes, threads)

    def _measured(self, processes: int, threads: int | None) -> ProcessRates:
        assert self.measurement is not None
        return build_measured_setting(
            self.measurement, partial(build_nominal_setting, self.cluster), processes, threads
        )

    def threads(self, processes: int) -> tuple[int | None, ...]:
        """Return the threads per process to try; None on GPUs."""
        if self.cluster.device != "cpu":
            return (None,)
        return list_thread_counts(None if self.calibration else self.measurement, processes, self.cluster.cpu_cores)

    def peak(self, devices: int, precision: str) -> float | None:
        """Return the operations per second of ``devices`` devices (a CPU is one) that were measured, if they were."""
        source = self.calibration or self.measurement
        if source is not None:
            processes = 1 if self.cluster.device == "cpu" else max(setting.processes for setting in source.settings)
            if (rate := find_peak_rate(source, precision)) is not None:
                return rate * devices / processes
        return None

    def collective(self, kind: CollectiveKind, size: float, group: Group) -> float:
        """Return the seconds of a collective over ``group``; ``size``: bytes of the full, unsharded tensor."""
        if group.ranks == 1 or not size:
            return 0.0
        setting = self.setting(group.per_node)
        curve = setting.curves.get(f"collective/{kind}")
        if group.nodes > 1 or curve is None:
            return self._estimate_by_links(kind, size, group)
        start, per_byte = curve.coefficients
        times, messages = count_ring_steps(kind, group.ranks)
        of_times, of_messages = count_ring_steps(kind, setting.processes)
        alone = start * messages / of_messages + per_byte * size * times / of_times
        return setting.exchange.waited + setting.exchange.factor * alone

    def all_to_all(self, size: float, group: Group) -> float:
        """Return the seconds in which each rank of ``group`` sends an equal part of ``size`` bytes to every rank."""
        if group.ranks == 1 or not size:
            return 0.0
        inside = size * (group.per_node - 1) / group.ranks / self._compute_bandwidth(self.cluster.link)
        if group.nodes == 1:
            return _START + inside + (group.ranks - 1) * self.cluster.link.latency
        network = self.cluster.network
        assert network is not None, "several nodes have a network"
        across = size * (group.ranks - group.per_node) / group.ranks / self._compute_bandwidth(network)
        return _START + max(inside, across) + (group.ranks - 1) * network.latency

    def _estimate_by_links(self, kind: CollectiveKind, size: float, group: Group) -> float:
        """Return the seconds of rings over all ranks, one per adapter of a node, limited by the slowest link.

        See nccl, graph/tuning.cc.
        """
        times, messages = count_ring_steps(kind, group.ranks)
        link = self.cluster.link
        inside = times * size / self._compute_bandwidth(link) if group.per_node > 1 else 0.0
        if group.nodes == 1:
            return _START + inside + messages * link.latency
        network = self.cluster.network
        assert network is not None, "several nodes have a network"
        # The rings share the adapters of a node; each carries the same bytes as every other link of its ring.
        _, hops = count_ring_steps(kind, group.nodes)
        across = times * size / (self._compute_bandwidth(network) * group.per_node)
        ring = hops * network.latency + (messages - hops) * link.latency
        rounds = 2 if kind == "all_reduce" else 1
        tree = rounds * ((group.per_node - 1) * link.latency + math.log2(group.nodes) * network.latency)
        return _START + max(inside, across) + (min(ring, tree) if kind == "all_reduce" else ring)

    def _compute_bandwidth(self, link: Link) -> float:
        return link.bandwidth * (_LINK[link.kind] if link.direct else _THROUGH_HOST)


_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}


@dataclass(frozen=True)
class _Units:
    """What the matrix units of a generation sustain on random numbers.

    ``sustained``: share of the peak, at ``watts`` per 10^12 operations per second of the peak. ``attention``: the share
    of that which flash attention reaches (forward, backward) on long sequences.
    """

    sustained: float
    watts: float
    attention: tuple[float, float]


# Best products found by search, on the largest module of a generation: 271 of 312 on an A100, 795 of 989 on an H100,
# 1745 of 2250 on a B200, 1769 on a B300, 668 of 1307 on an MI300X, 785 on an MI325X, 1565 of 2517 on an MI355X, 419 of
# 432 on a Gaudi 2, 1243 of 1678 on a Gaudi 3 (github.com/stas00/ml-engineering, Maximum Achievable Matmul FLOPS). Large
# products on an RTX PRO 6000: 350 of 504 (github.com/zzc0721/torch-performance-test-data, issues 160 and 161); GeForce
# cards have the power for twice the rate that they are sold with. Attention: figures of
# github.com/Dao-AILab/flash-attention for FlashAttention-2, which does not use Hopper's own instructions; on an MI300X
# 353 TFLOP/s forward and 194 to 207 backward (github.com/ROCm/flash-attention/issues/142), on a die of an MI250X 47 to
# 55 forward (github.com/ROCm/triton/issues/507), backward in the same proportion.
_UNITS: dict[tuple[str, int, int], _Units] = {
    ("NVIDIA", 7, 0): _Units(0.80, 2.4, (0.60, 0.50)),
    ("NVIDIA", 7, 5): _Units(0.60, 1.08, (0.60, 0.50)),
    ("NVIDIA", 8, 0): _Units(0.86, 1.28, (0.75, 0.68)),
    ("NVIDIA", 8, 6): _Units(0.80, 1.94, (0.75, 0.68)),
    ("NVIDIA", 8, 9): _Units(0.80, 0.97, (0.75, 0.68)),
    ("NVIDIA", 9, 0): _Units(0.76, 0.71, (0.48, 0.43)),
    ("NVIDIA", 10, 0): _Units(0.72, 0.44, (0.35, 0.30)),
    ("NVIDIA", 10, 3): _Units(0.73, 0.49, (0.35, 0.30)),
    ("NVIDIA", 12, 0): _Units(0.70, 1.19, (0.75, 0.68)),
    ("AMD", 9, 0): _Units(0.60, 1.46, (0.43, 0.25)),
    ("AMD", 9, 4): _Units(0.52, 0.57, (0.52, 0.30)),
    ("AMD", 9, 5): _Units(0.62, 0.56, (0.52, 0.30)),  # attention: as for the previous generation
    ("Intel", 2, 0): _Units(0.92, 1.39, (0.50, 0.43)),  # attention: as for other cards
    ("Intel", 3, 0): _Units(0.74, 0.54, (0.50, 0.43)),
}
# Factors on FlashAttention-2's rates: FlashAttention's (30 to 50 % of the peak forward and 25 to 35 % backward,
# compared with 50 to 73 %: arXiv 2307.08691, section 1), and those of kernels written for a generation:
# FlashAttention-3 on Hopper (648 TFLOP/s compared with 370 forward: arXiv 2407.08608, figure 5), cuDNN on Blackwell
# (1605 / 1.3 TFLOP/s forward: together.ai/blog/flashattention-4).
_FIRST_ATTENTION = (0.62, 0.50)
# torch's own kernels on AMD in 2024: 20 TFLOP/s backward on an MI300X (github.com/pytorch/pytorch/issues/135431).
_EARLY_AMD_ATTENTION = (1.0, 0.10)
_THIRD_ATTENTION = {(9, 0): (1.75, 1.7), (10, 0): (2.2, 2.2), (10, 3): (2.2, 2.2)}
_OTHER_UNITS = _Units(0.70, 1.0, (0.50, 0.43))
# With less power the clock and the voltage fall, so rates fall more slowly than power.
_RATE_BY_POWER = 0.6
_MOST_SUSTAINED = 0.92
# Rate at the shapes of models, relative to the best shapes: on an A100 235 to 255 TFLOP/s of 271.
_USUAL_SHAPES = 0.92
# Where power does not limit the clock it exceeds the datasheet's, by about the share that usual shapes lose (torch's
# products on an RTX 4090: 165 of its 165 TFLOP/s, github.com/tinygrad/tinygrad/pull/13623).
_MORE_THAN_ENOUGH = 1.3
# Rate of many small products in one kernel, relative to one product: 753 to 900 TFLOP/s on a B200 with the experts of
# DeepSeek-V3 and Llama 4, forward and backward (github.com/pytorch/ao, torchao/prototype/moe_training/README.md).
_GROUPED = {(10, 0): 0.55, (10, 3): 0.55}
_LENGTH_OF_HALF_RATE = 400  # tokens of a sequence at which attention reaches half its rate (ramps of the same figures)
_STREAMED = 0.85  # share of a card's memory bandwidth reached by kernels that read and write once
# Share of that for the kernel that unpacks 4-bit numbers, on memory faster than it can use (bitsandbytes: an
# optimization made it 1.4 to 2.1 times as fast on an A100 and an H100, but no faster on an RTX 4090 or an L40S, whose
# memory it already saturated: github.com/bitsandbytes-foundation/bitsandbytes/pull/1747).
_UNPACKED, _HBM = 0.6, 1.3e12
_KERNEL = 3e-6  # minimum seconds of a kernel on a GPU
_COMPUTE_UNITS = 120  # of a server GPU: 108 on an A100, 132 on an H100
_TILE = 128 * 128
# Seconds between two kernels launched from Python: an operation with autograd takes 7 us (github.com/pytorch/pytorch,
# issue 41383), and transformers' modules around it as much again.
_LAUNCH = 15e-6
_HOST_COPIES = 0.88  # share of a slot's rate (nvbandwidth on a PCIe 5 slot: 55.4 of 63 GB/s)
# Bandwidth of a server's memory, shared by all its processes (DeepSpeed's AdamW of 8e9 elements in the memory of 8
# H200: 1.8 s).
_HOST_BYTES = 130e9
_HIDDEN = 0.9  # share of a collective that overlaps with computation: copy engines and a few units run it

# A processor's cores: bytes per second of one core on data in its caches, by kind of kernel; and the rate of newly
# allocated memory, whose pages the kernel clears first.
_CORE_BYTES = {"copy": 50e9, "elementwise": 30e9, "reduction": 25e9}
_CACHED = 32e6
_FRESH_BYTES = 5e9
_CORE_KERNEL = 4e-6
_CPU_SUSTAINED = 0.85
_CPU_ATTENTION = (0.35, 0.30)
_CPU_LENGTH_OF_HALF_RATE = 60
_LOGITS = 0.15e9  # per second and core, through a softmax in fp32
_UPDATES = 0.6e9  # elements of AdamW per second and core, from memory
# Time in addition to each kernel of a step: the two that _LAUNCH counts, and waking threads; and the time that
# processes wait for each other at a collective.
_CPU_HOST, _CPU_WAIT = 2e-5, 2.5e-3
_GLOO_BYTES, _GLOO_MESSAGE = 1.0e9, 150e-6  # through the loopback interface


def build_nominal_setting(cluster: Cluster, processes: int, threads: int | None = None) -> ProcessRates:
    """Return the rates of each of ``processes`` that run at once on a node of ``cluster``, from its datasheets.

    ``threads``: threads of each process on a CPU; None shares the cores among them.
    """
    if cluster.device == "cpu":
        return _build_core_rates(cluster, processes, threads)
    return _build_gpu_rates(cluster, processes)


def _build_gpu_rates(cluster: Cluster, processes: int) -> ProcessRates:
    card = cluster.card
    units = _UNITS.get((card.vendor, *card.capability), _OTHER_UNITS)
    bandwidth = _STREAMED * card.memory_bandwidth
    curves: dict[str, Curve] = {}
    for precision, size in _BYTES.items():
        rate = _compute_sustained_rate(card, units, precision)
        if rate is None:
            continue
        per_byte = size / bandwidth
        wave = 2 * _TILE / (rate / _COMPUTE_UNITS) / 2  # half a wave of tiles is lost at the end, on average
        product = (_KERNEL, wave, 2 / (_USUAL_SHAPES * rate), per_byte, per_byte, per_byte)
        for layout in ("forward", "input", "weight"):
            curves[f"product/{precision}/{layout}"] = Curve("product", (), product)
        if (share := _GROUPED.get(card.capability)) is not None:
            slower = (_KERNEL, wave / share, product[2] / share, per_byte, per_byte, per_byte)
            curves[f"product/{precision}/grouped"] = Curve("product", (), slower)
        first = _FIRST_ATTENTION
        third = _THIRD_ATTENTION.get(card.capability, (1.0, 1.0))
        kernels = {"": (1.0, 1.0), "1": first, "3": third, "4": third, "early": _EARLY_AMD_ATTENTION}
        for suffix, factors in kernels.items():
            rates = [rate * part * factor for part, factor in zip(units.attention, factors, strict=True)]
            _add_attention(curves, precision, rates, _LENGTH_OF_HALF_RATE, suffix)
    for precision in ("fp32", "bf16", "fp16"):
        size = _BYTES[precision]
        unpack_factor = _UNPACKED if card.memory_bandwidth > _HBM else 1.0
        curves[f"traffic/{precision}/expansion"] = _build_line(_KERNEL, 1 / (unpack_factor * bandwidth))
        for kind in ("copy", "elementwise", "reduction"):
            curves[f"traffic/{precision}/{kind}"] = _build_line(_KERNEL, 1 / bandwidth)
        # Cast to fp32 if needed; maximum, differences, exponentials, sum, probabilities; the gradient written back.
        copy_bytes = 2 * (size + 4) if size < 4 else 0
        curves[f"loss/{precision}"] = _build_line(_KERNEL, (copy_bytes + 4 + 8 + 8 + 4 + 8) / bandwidth)
    curves["optimizer"] = _build_line(_KERNEL, 28 / bandwidth)  # reads p, g, m, v; writes p, m, v; fp32 each
    curves["host_optimizer"] = _build_line(_CORE_KERNEL, 28 * processes / _HOST_BYTES)
    for direction in ("to", "from"):
        curves[f"host/{direction}"] = _build_line(1e-5, 1 / (_HOST_COPIES * card.host_link.bandwidth))
    curves["data"] = Curve("batch", (), (1.5e-4, 2e-6, 2e-8))
    return ProcessRates(processes, None, curves, launch=_LAUNCH, overlap=_HIDDEN)


def _compute_sustained_rate(card: Card, units: _Units, precision: str) -> float | None:
    peak = card.rates.get(precision)
    if peak is None:
        return None
    fastest = max(card.rates.get("bf16", 0.0), card.rates.get("fp16", 0.0), card.rates.get("fp32", 0.0))
    power = (card.watts / (fastest / 1e12) / units.watts) ** _RATE_BY_POWER if card.watts else 1.0
    limit = _MOST_SUSTAINED if power < _MORE_THAN_ENOUGH else 1 / _USUAL_SHAPES
    return peak * min(limit, units.sustained * power)


def _build_core_rates(cluster: Cluster, processes: int, threads: int | None) -> ProcessRates:
    cores = cluster.cpu_cores / processes  # below 1 processes take turns
    cores = cores if threads is None else min(cores, threads)
    share = cores / cluster.cpu_cores
    curves: dict[str, Curve] = {}
    for precision in ("fp32", "bf16", "fp16"):
        # Without units for a precision, a processor computes through fp32, including conversions.
        peak = cluster.card.rates.get(precision, cluster.card.rates.get("fp32", 1e10) / 2) * share
        rate, size = _CPU_SUSTAINED * peak, _BYTES[precision]
        per_byte = size / (_CORE_BYTES["copy"] * cores)
        for layout in ("forward", "input", "weight"):
            coefficients = _CORE_KERNEL, 0.0, 2 / rate, per_byte, per_byte, per_byte
            curves[f"product/{precision}/{layout}"] = Curve("product", (), coefficients)
        fp32 = _CPU_SUSTAINED * cluster.card.rates.get("fp32", 1e10) * share
        _add_attention(curves, precision, [fp32 * part for part in _CPU_ATTENTION], _CPU_LENGTH_OF_HALF_RATE)
        for kind, rate_of_core in _CORE_BYTES.items():
            curves[f"traffic/{precision}/{kind}"] = _build_core_traffic(rate_of_core * cores)
        curves[f"loss/{precision}"] = _build_line(_CORE_KERNEL, 1 / (_LOGITS * cores))
    curves["optimizer"] = _build_line(_CORE_KERNEL, 1 / (_UPDATES * cores))
    curves["data"] = Curve("batch", (), (2e-5, 2e-6, 2e-8))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        times, messages = count_ring_steps(kind, processes)
        curves[f"collective/{kind}"] = _build_line(messages * _GLOO_MESSAGE, times / _GLOO_BYTES)
    in_step = {precision: InStep(host=_CPU_HOST) for precision in ("fp32", "bf16", "fp16")}
    between = Exchanged(waited=_CPU_WAIT)
    return ProcessRates(processes, max(1, int(cores)), curves, _CORE_KERNEL, in_step=in_step, exchange=between)


def _build_core_traffic(rate: float) -> Curve:
    points = [(size, _CORE_KERNEL + size / rate) for size in (1e3, 1e5, 1e6, _CACHED)]
    points += [(4 * _CACHED * times, 4 * _CACHED * times / _FRESH_BYTES) for times in (1, 4)]
    return Curve("table", tuple(TimedSample((size,), seconds) for size, seconds in points))


def _add_attention(
    curves: dict[str, Curve], precision: str, rates: Sequence[float], half: float, suffix: str = ""
) -> None:
    """Add the curves of attention: seconds per token and channel, by the length of the sequence.

    Each token takes products of 2 (forward) and 5 (backward) numbers with each earlier token.
    """
    lengths = [float(2**power) for power in range(4, 20)]
    for direction, products, rate in (("forward", 2, rates[0]), ("backward", 5, rates[1])):
        samples = tuple(TimedSample((length,), products * (length + half) / rate) for length in lengths)
        curves[f"attention/{precision}/{direction}{suffix}"] = Curve("table", samples)


def count_ring_steps(kind: str, ranks: int) -> tuple[float, float]:
    """Return, for a ring of ``ranks``, how often the tensor's bytes pass each link, and the number of consecutive
    messages.

    See github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    if ranks == 1:
        return 0.0, 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks, 2.0 * (ranks - 1)
    if kind == "broadcast":
        return 1.0, ranks - 1.0
    return (ranks - 1) / ranks, ranks - 1.0


def _build_line(start: float, slope: float) -> Curve:
    assert len(FORMS["amount"](0.0)) == 2
    return Curve("amount", (), (start, slope))
