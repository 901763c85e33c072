"""Links between devices: NVLink and similar, PCIe, the network between nodes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

LinkKind = Literal["nvlink", "infinity_fabric", "ethernet", "pcie", "network", "memory"]

# Seconds per step of a ring in addition to its bytes: NCCL's own table (src/graph/tuning.cc: ring, simple protocol).
# Ethernet ports between the devices of a node are assumed to have a network's latency.
_LATENCY = {
    "nvlink": 3.4e-6,
    "infinity_fabric": 3.4e-6,
    "ethernet": 14e-6,
    "pcie": 5.7e-6,
    "network": 14e-6,
    "memory": 1e-6,
}
# One lane, one direction, after its line code: 8, 16, 32 and 64 GT/s.
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# One NVLink, one direction.
_NVLINK_EACH = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
_NVLINK_GENERATION = {6: 1, 7: 2, 8: 3, 9: 4, 10: 5}  # by the major compute capability
_MOST_NVLINKS = 18
_NAMES = {"nvlink": "NVLink", "infinity_fabric": "Infinity Fabric", "ethernet": "RoCE", "pcie": "PCIe"}


# pydantic settings for reading a machine's description from JSON: no further keys, no conversions.
STRICT: Any = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class Link:
    """A link of a device.

    ``bandwidth``: bytes per second that one device can send in one direction, at the wire's rate. ``latency``: seconds
    per message in addition. ``span``: number of devices of a node that it connects; 0 for all. ``direct``: whether
    devices write into each other's memory; otherwise data passes through the host's.
    """

    __pydantic_config__ = STRICT

    kind: LinkKind
    bandwidth: float
    latency: float
    generation: int | None = None
    span: int = 0
    direct: bool = True

    def describe(self) -> str:
        """Describe the link with its rate."""
        name = " ".join(str(part) for part in (_NAMES.get(self.kind, self.kind), self.generation) if part)
        rate = f"{self.bandwidth / 1e9:.3g} GB/s each way"
        return f"{name}, {rate}" if self.direct else f"{name}, {rate}, through the host's memory"


def build_fabric_link(kind: LinkKind, generation: int, bandwidth: float, span: int) -> Link:
    """Return an NVLink or similar with ``bandwidth`` bytes per second and direction that connects ``span`` devices."""
    return Link(kind, bandwidth, _LATENCY[kind], generation, span)


def build_pcie_link(generation: int, lanes: int = 16, direct: bool = True) -> Link:
    """Return a PCI Express slot."""
    lane = _PCIE_LANE[min(generation, max(_PCIE_LANE))]
    return Link("pcie", lane * lanes, _LATENCY["pcie"], generation, direct=direct)


def build_network_link(bits_per_second: float, devices: int) -> Link:
    """Return each device's share of a node's network of ``bits_per_second``, when all ``devices`` send."""
    return Link("network", bits_per_second / 8 / devices, _LATENCY["network"])


def build_memory_link(bandwidth: float) -> Link:
    """Return the memory that processes of one CPU share."""
    return Link("memory", bandwidth, _LATENCY["memory"])


def detect_links(handles: Sequence[Any], index: int) -> tuple[Link, Link]:
    """Return the links of GPU ``index`` of the NVML ``handles`` to the other GPUs and to the host.

    NVML must be initialized. Values that the driver does not report are assumed to be the lowest: PCIe 3, no direct
    access.
    """
    import pynvml

    handle, peers = handles[index], [peer for i, peer in enumerate(handles) if i != index]
    slot = _read_slot(handle)
    can_reach = partial(_reports, pynvml.NVML_P2P_STATUS_OK, pynvml.nvmlDeviceGetP2PStatus, handle)
    is_active = partial(_reports, pynvml.NVML_FEATURE_ENABLED, pynvml.nvmlDeviceGetNvLinkState, handle)
    nvlink_count = sum(can_reach(peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) for peer in peers)
    lines = sum(map(is_active, range(_MOST_NVLINKS))) if nvlink_count else 0
    generation = _NVLINK_GENERATION.get(pynvml.nvmlDeviceGetCudaComputeCapability(handle)[0])
    if lines and generation:
        return build_fabric_link("nvlink", generation, lines * _NVLINK_EACH[generation], nvlink_count + 1), slot
    # A plain 0: pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple by mistake.
    direct = bool(peers) and all(can_reach(peer, 0) for peer in peers)
    return Link("pcie", slot.bandwidth, slot.latency, slot.generation, direct=direct), slot


def _read_slot(handle: Any) -> Link:
    import pynvml

    try:
        return build_pcie_link(
            pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        )
    except pynvml.NVMLError:
        return build_pcie_link(3)


def _reports(answer: int, ask: Callable[..., int], *arguments: Any) -> bool:
    """Return whether NVML gives this answer, and no error."""
    import pynvml

    try:
        return bool(ask(*arguments) == answer)
    except pynvml.NVMLError:
        return False
