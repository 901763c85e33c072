"""Rates of a machine for training: from its calibration, or its quick measurement, or its datasheets.

All have the form of the same curves (``machine.measured.calibration.ProcessRates``). Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.machine.describe import Cluster
from trainwright.machine.links import Link
from trainwright.machine.measured.calibration import Calibration, ProcessRates
from trainwright.planning.step_time.measured_blocks import with_measured_blocks
from trainwright.planning.step_time.rates_measured import measured_setting, peak, thread_counts
from trainwright.planning.step_time.rates_nominal import nominal_setting, steps_of

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
    """Rates of ``cluster``. ``known``: cache of results computed from them."""

    cluster: Cluster
    calibration: Calibration | None = None
    measurement: Calibration | None = None
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _settings: dict[tuple[int, int | None], ProcessRates] = field(default_factory=dict, repr=False, compare=False)

    @property
    def calibrated(self) -> bool:
        """Whether the rates come from a calibration."""
        return self.calibration is not None

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
            found = calibration.nearest(processes)
            if self.measurement is None:
                return found
            return with_measured_blocks(found, self.measurement, lambda number, _: calibration.nearest(number))
        if self.measurement is not None:
            return with_measured_blocks(self._measured(processes, threads), self.measurement, self._measured)
        return self._nominal(processes, threads)

    def _measured(self, processes: int, threads: int | None) -> ProcessRates:
        assert self.measurement is not None
        return measured_setting(self.measurement, self._nominal, processes, threads)

    def _nominal(self, processes: int, threads: int | None) -> ProcessRates:
        return nominal_setting(self.cluster, processes, threads)

    def threads(self, processes: int) -> tuple[int | None, ...]:
        """Return the threads per process to try; None on GPUs."""
        if self.cluster.device != "cpu":
            return (None,)
        return thread_counts(None if self.calibration else self.measurement, processes, self.cluster.cpu_cores)

    def peak(self, devices: int, precision: str) -> float | None:
        """Return the operations per second of ``devices`` devices (a CPU is one) that were measured, if they were."""
        found = self.calibration or self.measurement
        if found is not None:
            each = 1 if self.cluster.device == "cpu" else max(setting.processes for setting in found.settings)
            if (measured := peak(found, precision)) is not None:
                return measured * devices / each
        return None

    def collective(self, kind: CollectiveKind, size: float, group: Group) -> float:
        """Return the seconds of a collective over ``group``; ``size``: bytes of the full, unsharded tensor."""
        if group.ranks == 1 or not size:
            return 0.0
        setting = self.setting(group.per_node)
        measured = setting.curves.get(f"collective/{kind}")
        if group.nodes > 1 or measured is None:
            return self._by_links(kind, size, group)
        start, each = measured.coefficients
        (times, messages), (of_times, of_messages) = steps_of(kind, group.ranks), steps_of(kind, setting.processes)
        alone = start * messages / of_messages + each * size * times / of_times
        return setting.exchange.waited + setting.exchange.factor * alone

    def all_to_all(self, size: float, group: Group) -> float:
        """Return the seconds in which each rank of ``group`` sends an equal part of ``size`` bytes to every rank."""
        if group.ranks == 1 or not size:
            return 0.0
        inside = size * (group.per_node - 1) / group.ranks / self._bandwidth(self.cluster.link)
        if group.nodes == 1:
            return _START + inside + (group.ranks - 1) * self.cluster.link.latency
        network = self.cluster.network
        assert network is not None, "several nodes have a network"
        across = size * (group.ranks - group.per_node) / group.ranks / self._bandwidth(network)
        return _START + max(inside, across) + (group.ranks - 1) * network.latency

    def _by_links(self, kind: CollectiveKind, size: float, group: Group) -> float:
        """Return the seconds of rings over all ranks, one per adapter of a node, limited by the slowest link.

        See nccl, graph/tuning.cc.
        """
        times, messages = steps_of(kind, group.ranks)
        link = self.cluster.link
        inside = times * size / self._bandwidth(link) if group.per_node > 1 else 0.0
        if group.nodes == 1:
            return _START + inside + messages * link.latency
        network = self.cluster.network
        assert network is not None, "several nodes have a network"
        # The rings share the adapters of a node; each carries the same bytes as every other link of its ring.
        _, hops = steps_of(kind, group.nodes)
        across = times * size / (self._bandwidth(network) * group.per_node)
        ring = hops * network.latency + (messages - hops) * link.latency
        rounds = 2 if kind == "all_reduce" else 1
        tree = rounds * ((group.per_node - 1) * link.latency + math.log2(group.nodes) * network.latency)
        return _START + max(inside, across) + (min(ring, tree) if kind == "all_reduce" else ring)

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth * (_LINK[link.kind] if link.direct else _THROUGH_HOST)


def rates_of(cluster: Cluster, calibration: Calibration | None = None, measurement: Calibration | None = None) -> Rates:
    """Return the rates of ``cluster``; ``calibration`` and ``measurement`` are of this machine."""
    return Rates(cluster, calibration, measurement)
