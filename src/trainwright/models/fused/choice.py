"""The choice between plain operations and fused Triton kernels: ``model.kernels``. Imports no torch."""

from __future__ import annotations

from typing import Literal

from trainwright.errors import MachineError

Kernels = Literal["auto", "eager", "triton"]

_MIN_CAPABILITY = (8, 0)  # bf16 in Triton, as in its tl.dot and conversions


def refuse_missing(requested: Kernels, vendor: str, capability: tuple[int, int], missing: str | None) -> None:
    """Raise MachineError if ``model.kernels`` is triton and the device cannot have it.

    Args:
        vendor: of the device, "CPU" for a CPU.
        missing: why Triton code cannot be compiled on the machine, or None.
    """
    if requested == "triton" and (why := explain_not_fused(vendor, capability, missing)) is not None:
        raise MachineError(f"model.kernels: triton is not possible here: {why}; set it to auto or eager")


def is_fused(requested: Kernels) -> bool:
    """Return whether a run has the fused kernels.

    ``auto`` has none, since no run on a GPU has measured them yet; on a CPU it computes in blocks (fused/blocked.py).
    """
    return requested == "triton"


def explain_auto(vendor: str, capability: tuple[int, int], missing: str | None) -> str:
    """Return why ``auto`` has plain operations on a GPU; the arguments are those of ``refuse_missing``."""
    against = explain_not_fused(vendor, capability, missing)
    if against:
        return f"triton {against}"
    return "triton is possible, but its kernels were not measured on GPUs yet (`trainwright doctor kernels` tests them)"


def explain_not_fused(vendor: str, capability: tuple[int, int], missing: str | None) -> str | None:
    """Return why a device cannot have the fused kernels, or None; the arguments are those of ``refuse_missing``."""
    if vendor == "CPU":
        return "needs an NVIDIA GPU, the device is a CPU"
    if vendor != "NVIDIA":
        return f"needs an NVIDIA GPU, the device is one of {vendor}"
    if capability < _MIN_CAPABILITY:
        return f"needs compute capability 8.0 or higher, this GPU has {capability[0]}.{capability[1]}"
    return missing
