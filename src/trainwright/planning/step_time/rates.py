"""How fast a machine does what training asks of it: by its calibration, else by what was measured of it in a few
seconds, else by its datasheets.

All come as the same curves (``machine.calibration.Setting``). Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.machine.describe import Cluster
from trainwright.machine.links import Link
from trainwright.machine.measured.calibration import Calibration, Setting
from trainwright.planning.step_time.rates_measured import measured_setting, peak, thread_counts
from trainwright.planning.step_time.rates_nominal import nominal_setting, steps_of

Layout = Literal["forward", "input", "weight"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]

# Of a link's rate, by large messages (all-gathers of NCCL: 361 of 450 GB/s over NVLink 4, 235 of 300 over NVLink 3, 313
# of 448 over Infinity Fabric; 46 to 48 of 50 GB/s through an InfiniBand adapter, less where many nodes take part:
# github.com/stas00/ml-engineering, network; github.com/NVIDIA/nccl-tests/issues/290 and /119).
_LINK = {"nvlink": 0.8, "infinity_fabric": 0.7, "ethernet": 0.7, "pcie": 0.7, "network": 0.75, "memory": 0.5}
_THROUGH_HOST = 0.35  # of a slot's rate, where devices do not write into each other's memory
# Beside its steps a collective of NCCL takes a start (all-reduce of 1 MiB on 8 H200: 46 us).
_START = 25e-6


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective: ``nodes`` nodes with ``per_node`` of them in each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the group."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Rates:
    """Speeds of ``cluster``. ``known``: what follows from them and was worked out before."""

    cluster: Cluster
    calibration: Calibration | None = None
    measurement: Calibration | None = None
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _settings: dict[tuple[int, int | None], Setting] = field(default_factory=dict, repr=False, compare=False)

    @property
    def calibrated(self) -> bool:
        """Return whether the rates come from a calibration."""
        return self.calibration is not None

    @property
    def are_measured(self) -> bool:
        """Whether they are of this machine, and not of others like it."""
        return self.calibration is not None or self.measurement is not None

    def setting(self, processes: int, threads: int | None = None) -> Setting:
        """Return what each of ``processes`` on a node does, all of them at once; on a CPU of so many ``threads``
        each, all that there are if it is not said.
        """
        if self.cluster.device == "cpu" and threads is None:
            threads = max(1, self.cluster.cpu_cores // processes)
        key = processes, threads
        if key not in self._settings:
            self._settings[key] = self._setting(*key)
        return self._settings[key]

    def _setting(self, processes: int, threads: int | None) -> Setting:
        if self.calibration is not None:
            return self.calibration.nearest(processes)
        if self.measurement is not None:
            return measured_setting(self.measurement, self._nominal, processes, threads)
        return self._nominal(processes, threads)

    def _nominal(self, processes: int, threads: int | None) -> Setting:
        return nominal_setting(self.cluster, processes, threads)

    def threads(self, processes: int) -> tuple[int | None, ...]:
        """Of a process, that are worth trying; None on GPUs."""
        if self.cluster.device != "cpu":
            return (None,)
        return thread_counts(None if self.calibration else self.measurement, processes, self.cluster.cpu_cores)

    def peak(self, devices: int, precision: str) -> float | None:
        """Operations a second of so many devices (a CPU is one): as measured, else by the datasheet of a GPU; None of
        a CPU that nobody has measured, whose flags say little."""
        found = self.calibration or self.measurement
        if found is not None:
            each = 1 if self.cluster.device == "cpu" else max(setting.processes for setting in found.settings)
            if (measured := peak(found, precision)) is not None:
                return measured * devices / each
        rate = self.cluster.card.rates.get(precision) if self.cluster.device == "cuda" else None
        return None if rate is None else rate * devices

    def collective(self, kind: CollectiveKind, size: float, group: Group) -> float:
        """Seconds of a collective over ``group`` on a tensor of ``size`` bytes, the whole of it where it is sharded."""
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

    def _by_links(self, kind: CollectiveKind, size: float, group: Group) -> float:
        """Rings over all ranks, as many as a node has adapters: the slowest of their links decides (nccl,
        graph/tuning.cc)."""
        times, messages = steps_of(kind, group.ranks)
        link = self.cluster.link
        inside = times * size / self._bandwidth(link) if group.per_node > 1 else 0.0
        if group.nodes == 1:
            return _START + inside + messages * link.latency
        network = self.cluster.network
        assert network is not None, "several nodes have a network"
        # The rings share the adapters of a node, each of which carries what every other link of its ring does.
        _, hops = steps_of(kind, group.nodes)
        across = times * size / (self._bandwidth(network) * group.per_node)
        ring = hops * network.latency + (messages - hops) * link.latency
        rounds = 2 if kind == "all_reduce" else 1
        tree = rounds * ((group.per_node - 1) * link.latency + math.log2(group.nodes) * network.latency)
        return _START + max(inside, across) + (min(ring, tree) if kind == "all_reduce" else ring)

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth * (_LINK[link.kind] if link.direct else _THROUGH_HOST)


def rates_of(cluster: Cluster, calibration: Calibration | None = None, measurement: Calibration | None = None) -> Rates:
    """Rates of ``cluster``; ``calibration`` and ``measurement`` are of this machine, whose nodes the cluster's are
    like."""
    return Rates(cluster, calibration, measurement)
