"""The vendors of GPUs that training runs on, and what differs between them. Imports no torch.

Everything else speaks to a device through ``torch.accelerator`` and ``torch.get_device_module``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Vendor = Literal["CPU", "NVIDIA", "AMD", "Intel"]


@dataclass(frozen=True)
class GpuVendor:
    """A vendor of GPUs.

    ``device_type``: of its GPUs in torch. ``software``: what torch is built with for them. ``lacks``: modules of Python
    and precisions that are not used on its GPUs, each with the reason.
    """

    name: Vendor
    device_type: Literal["cuda", "xpu"]
    software: str
    lacks: Mapping[str, str] = field(default_factory=dict, hash=False)


_TF32 = "torch's setting is for NVIDIA's units; set it to false"
VENDORS: Mapping[str, GpuVendor] = {
    vendor.name: vendor
    for vendor in (
        GpuVendor("NVIDIA", "cuda", "CUDA"),
        GpuVendor("AMD", "cuda", "ROCm", {"tf32": _TF32}),  # builds for ROCm call their devices cuda, and RCCL nccl
        GpuVendor(
            "Intel",
            "xpu",
            "XPU",
            {"tf32": _TF32, "deepspeed": "DeepSpeed compiles its operators with Intel's compiler; fsdp does the same"},
        ),
    )
}
GPU_TYPES = tuple(dict.fromkeys(vendor.device_type for vendor in VENDORS.values()))
TRAINING_RUNS_ON = "training runs on NVIDIA, AMD and Intel GPUs and on CPUs"


def look_up_device_type(vendor: str) -> str:
    """Return the type of a vendor's devices in torch; "cpu" for the vendor "CPU"."""
    return VENDORS[vendor].device_type if vendor in VENDORS else "cpu"


def explain_missing_feature(vendor: str, feature: str) -> str | None:
    """Return why a module of Python or a precision is not used on the devices of a vendor, or None."""
    why = VENDORS[vendor].lacks.get(feature) if vendor in VENDORS else None
    return None if why is None else f"is not possible on GPUs of {vendor}: {why}"


def look_up_processor(device_type: str) -> Literal["cpu", "gpu"]:
    """Return which of the two kinds of processors a type of torch's devices is."""
    return "cpu" if device_type == "cpu" else "gpu"
