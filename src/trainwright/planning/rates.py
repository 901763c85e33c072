"""How fast a machine does what training asks of it: from its calibration, else from its datasheets.

Both come as the same curves (``machine.calibration.Setting``). Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.machine.calibration import Calibration, Setting
from trainwright.machine.describe import Cluster
from trainwright.machine.links import Link
from trainwright.planning.rates_nominal import nominal_setting, steps_of

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
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Rates:
    """Speeds of ``cluster``. ``known``: what follows from them and was worked out before."""

    cluster: Cluster
    calibration: Calibration | None = None
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _settings: dict[int, Setting] = field(default_factory=dict, repr=False, compare=False)

    @property
    def calibrated(self) -> bool:
        return self.calibration is not None

    def setting(self, processes: int) -> Setting:
        """What each of ``processes`` on a node does, all of them at once."""
        if processes not in self._settings:
            if self.calibration is None:
                self._settings[processes] = nominal_setting(self.cluster, processes)
            else:
                self._settings[processes] = self.calibration.nearest(processes)
        return self._settings[processes]

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
        """A ring inside each node beside rings between nodes, of which the slower decides (nccl, graph/tuning.cc)."""
        times, messages = steps_of(kind, group.ranks)
        link = self.cluster.link
        inside = times * size / self._bandwidth(link) if group.per_node > 1 else 0.0
        if group.nodes == 1:
            return _START + inside + messages * link.latency
        network = self.cluster.network
        assert network is not None, "several nodes have a network"
        # Each node's adapters carry what the other nodes have; all its ranks share them.
        between, hops = steps_of(kind, group.nodes)
        across = between * size / (self._bandwidth(network) * group.per_node)
        ring = hops * network.latency + (messages - hops) * link.latency
        rounds = 2 if kind == "all_reduce" else 1
        tree = rounds * ((group.per_node - 1) * link.latency + math.log2(group.nodes) * network.latency)
        return _START + max(inside, across) + (min(ring, tree) if kind == "all_reduce" else ring)

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth * (_LINK[link.kind] if link.direct else _THROUGH_HOST)


def rates_of(cluster: Cluster, calibration: Calibration | None = None) -> Rates:
    """Rates of ``cluster``; ``calibration`` is one of this machine, whose nodes the cluster's are like."""
    return Rates(cluster, calibration)
