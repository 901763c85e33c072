"""The devices of a cluster as its attention kernels see them. Imports no torch."""

from __future__ import annotations

from typing import Literal

from trainwright.machine.describe import Cluster
from trainwright.models.attention.kernels import ASSUMED, Platform, Vendor, missing_kernels
from trainwright.planning.operations.shapes import Device
from trainwright.planning.workload import Choice, Workload


def device_of(workload: Workload, choice: Choice, cluster: Cluster) -> Device:
    """Return the device that a process of ``choice`` computes on."""
    if cluster.device == "cpu":
        return Device("cpu", choice.threads or 1, attention=workload.attention)
    vendor: Vendor = "NVIDIA" if cluster.card.vendor == "NVIDIA" else "AMD"  # others are only planned for
    missing = missing_kernels() if cluster.is_here else ASSUMED.missing
    platform = Platform(vendor, cluster.card.capability, missing, workload.attention)
    half: Literal["bf16", "fp16"] = "fp16" if choice.mixed_precision == "fp16" else "bf16"
    return Device("cuda", platform=platform, half=half, deterministic=workload.deterministic)
