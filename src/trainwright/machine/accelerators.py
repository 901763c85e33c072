"""Detect accelerators that are present but cannot be trained on, so that none is silently ignored in favor of the CPU.

Reads files of the kernel and its drivers below a given directory; imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import MachineError
from trainwright.machine.cgroups import read_text
from trainwright.machine.vendors import GPU_TYPES, TRAINING_RUNS_ON, VENDORS, Vendor

if TYPE_CHECKING:
    from trainwright.machine.machine import Machine

ON_PURPOSE = "set parallel.device=cpu to train on the CPU"
HIDE = "hide it with CUDA_VISIBLE_DEVICES= to use the CPU"  # for commands without a recipe

# Vendors and classes of PCI devices (pci.ids): display controllers, and processing accelerators.
_NVIDIA, _AMD, _INTEL = "0x10de", "0x1002", "0x8086"
_OTHERS = {"0x1da3": "Gaudi (Intel)", "0x1ae0": "TPU (Google)"}
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
_AMD_CARDS = ("0x0380", "0x0302", _ACCELERATOR)  # with an output for a display they may be a processor's


@dataclass(frozen=True)
class Nvml:
    """Values from NVIDIA's management library. ``error``: why it is unavailable. ``mig``: GPUs split by MIG."""

    count: int = 0
    error: str | None = None
    driver_cuda: int | None = None  # the newest major version of CUDA that the driver supports
    mig: tuple[int, ...] = ()


@dataclass(frozen=True)
class Build:
    """The build of the installed torch; ``cuda``, ``hip`` and ``xpu`` are None for a build without that software."""

    version: str
    cuda: str | None
    hip: str | None = None
    xpu: str | None = None

    def supports_vendor(self, vendor: Vendor) -> bool:
        """Return whether it is for the GPUs of a vendor."""
        return {"NVIDIA": self.cuda, "AMD": self.hip, "Intel": self.xpu}.get(vendor) is not None

    def describe(self) -> str:
        """Return what it is for, in words."""
        software = next((VENDORS[name].software for name in VENDORS if self.supports_vendor(VENDORS[name].name)), None)
        return "a build for CPUs" if software is None else f"a {software} build"


def restrict_to_device(machine: Machine, device: str) -> Machine:
    """Return the machine for a run whose ``parallel.device`` is ``device``: without GPUs if that is cpu.

    Raises:
        MachineError: a GPU is requested and there is none, or there is one that cannot be used and the CPU is not
            requested.
    """
    if device == "cpu":
        return replace(machine, gpus=(), unusable=())
    if machine.unusable:
        reasons = "; ".join(machine.unusable)
        raise MachineError(f"parallel.device: {device}, but {reasons}. Fix that, or {ON_PURPOSE}")
    if device in GPU_TYPES and not machine.gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES is {hidden!r}, which hides them"
        raise MachineError(f"parallel.device: {device}, but no GPU was found ({machine.describe()}){why}; {ON_PURPOSE}")
    if device in GPU_TYPES and device != machine.device:
        raise MachineError(
            f"parallel.device: {device}, but the GPUs are of {machine.gpus[0].vendor}, whose type in torch is "
            f"{machine.device} ({machine.describe()}); set it to {machine.device} or auto"
        )
    return machine


def refuse_unusable(machine: Machine) -> None:
    """Raise MachineError if there is an accelerator that cannot be used; for commands without a recipe."""
    if machine.unusable:
        raise MachineError(f"{'; '.join(machine.unusable)}. Fix that, or {HIDE}")


def find_other_vendor(build: Build, root: Path = Path("/")) -> Vendor | None:
    """Return the vendor other than NVIDIA whose GPUs are in this machine and whose software torch is built with."""
    present: dict[Vendor, int] = {"AMD": _count_amd_gpus(root), "Intel": _count_intel_gpus(root)}
    return next((vendor for vendor, count in present.items() if count and build.supports_vendor(vendor)), None)


def explain_unusable(
    chosen: int,
    nvml: Nvml,
    build: Build,
    root: Path = Path("/"),
    variables: Mapping[str, str] | None = None,
    unlisted: str | None = None,
) -> tuple[str, ...]:
    """Return the reasons why accelerators of this machine cannot be trained on; empty if all can, or are hidden.

    Args:
        chosen: number of GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible: known to NVML, or else to torch.
        unlisted: why torch, built for GPUs of another vendor than NVIDIA, lists none of them.
        root: the directory of /proc, /sys and /dev.
    """
    variables = os.environ if variables is None else variables
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ()  # the documented way to train on the CPU
    reasons = [
        *_explain_nvidia(chosen, nvml, build, root, visible),
        *(_explain_other_vendors(build, unlisted, root) if not chosen else ()),
    ]
    return tuple(reasons or ([] if chosen else _explain_reserved(variables)))


def read_installed_build() -> Build:
    """Return the build of the installed torch, read from its file: importing it takes a second."""
    spec = find_spec("torch")
    directories = list(spec.submodule_search_locations or []) if spec is not None else []
    text = read_text(Path(directories[0]) / "version.py") if directories else ""

    def value(name: str) -> str | None:
        match = re.search(rf"^{name}\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE)
        return match[1] if match else None

    return Build(value("__version__") or "unknown", value("cuda"), value("hip"), value("xpu"))


def ask_nvml(pynvml: Any) -> Nvml:
    """Return the values from NVML, which must be initialized."""
    mig = []
    count = pynvml.nvmlDeviceGetCount()
    for index in range(count):
        try:
            current, _ = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError:  # a GPU that cannot be split
            continue
        if current:
            mig.append(index)
    try:
        driver = int(pynvml.nvmlSystemGetCudaDriverVersion()) // 1000
    except pynvml.NVMLError:
        driver = None
    return Nvml(count, None, driver, tuple(mig))


def _explain_nvidia(chosen: int, nvml: Nvml, build: Build, root: Path, visible: str | None) -> Iterator[str]:
    count = nvml.count or _count_nvidia_gpus(root)
    if not count:
        return
    gpus = f"{count} NVIDIA GPU{'s' * (count > 1)}"
    if nvml.count == 0:
        why = nvml.error or "it finds none"
        yield (
            f"there {'are' if count > 1 else 'is'} {gpus} that NVIDIA's driver does not give to this process (NVML: "
            f"{why}): load or install the driver, or start the container with its GPUs, as docker run --gpus all"
        )
        return
    if nvml.error is not None:
        yield (
            f"of {gpus} one does not answer (NVML: {nvml.error}): restart the machine, or leave this GPU out, as with "
            "CUDA_VISIBLE_DEVICES=0"
        )
        return
    if visible is not None and "MIG-" in visible:
        yield f"CUDA_VISIBLE_DEVICES is {visible!r}: slices of a GPU split by MIG are not supported; {_suggest_fix()}"
        return
    if chosen == 0:
        yield f"CUDA_VISIBLE_DEVICES is {visible!r}, which selects none of the {gpus}: unset it, or select a GPU"
        return
    if nvml.mig:
        which = ", ".join(map(str, nvml.mig))
        yield f"GPU {which} is split by MIG, and a process can use only one slice; {_suggest_fix()}"
    if build.cuda is None:
        yield _describe_other_build(count, gpus, build, "CUDA")
    elif nvml.driver_cuda is not None and nvml.driver_cuda < int(build.cuda.partition(".")[0]):
        yield (
            f"the NVIDIA driver runs CUDA {nvml.driver_cuda}, and torch {build.version} needs CUDA {build.cuda}: "
            f"update the driver, or install torch for CUDA {nvml.driver_cuda}"
        )


def _suggest_fix() -> str:
    return "have an administrator turn it off (nvidia-smi -mig 0), or use a whole GPU"


def _count_nvidia_gpus(root: Path) -> int:
    """Return the number of GPUs shown by the driver's files, its devices or the bus, whichever shows most."""
    return max(
        _count_entries(root / "proc/driver/nvidia/gpus", r".+"),
        _count_entries(root / "dev", r"nvidia\d+"),
        _count_entries(root / "dev", r"nvhost-gpu|nvgpu"),  # Jetson's, which older drivers do not show to NVML
        sum(vendor == _NVIDIA and kind.startswith(_DISPLAY) for _, vendor, kind in _list_pci_devices(root)),
    )


def _explain_reserved(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a message if a scheduler or the user reserved GPUs for this process and none is found."""
    names = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")
    for name in names:
        if (value := variables.get(name, "").strip()) not in ("", "0" if name == "SLURM_GPUS_ON_NODE" else ""):
            yield f"{name} is {value}, but no GPU was found: check nvidia-smi, or unset it"
            return


def _describe_other_build(count: int, gpus: str, build: Build, software: str) -> str:
    return (
        f"there {'are' if count > 1 else 'is'} {gpus}, and torch {build.version} is {build.describe()}: install one "
        f"for {software} (https://pytorch.org/get-started/locally)"
    )


_ACCESS: Mapping[Vendor, str] = {
    "AMD": "give this process /dev/kfd and /dev/dri (groups render and video), and look at HIP_VISIBLE_DEVICES",
    "Intel": "give this process /dev/dri (group render), install Intel's compute runtime, and look at ZE_AFFINITY_MASK",
}


def _explain_other_vendors(build: Build, unlisted: str | None, root: Path) -> Iterator[str]:
    devices = []
    counts: dict[Vendor, int] = {"AMD": _count_amd_gpus(root), "Intel": _count_intel_gpus(root)}
    for vendor, count in counts.items():
        if not count:
            continue
        software = VENDORS[vendor].software
        gpus = f"{count} {vendor} GPU{'s' * (count > 1)} ({software})"
        if build.supports_vendor(vendor):
            yield f"torch {build.version} does not list the {gpus} ({unlisted or 'it finds none'}): {_ACCESS[vendor]}"
        else:
            yield _describe_other_build(count, gpus, build, software)
    accelerators = [vendor for _, vendor, kind in _list_pci_devices(root) if kind.startswith(_ACCELERATOR)]
    for number, name in _OTHERS.items():
        if count := accelerators.count(number):
            devices.append(f"{count} {name}")
    if neuron := _count_entries(root / "dev", r"neuron\d+"):
        devices.append(f"{neuron} AWS Neuron device{'s' * (neuron > 1)}")
    if devices:
        yield f"{' and '.join(devices)} cannot be used: {TRAINING_RUNS_ON}"


def _count_intel_gpus(root: Path) -> int:
    """Return the number of Intel's cards: its integrated graphics are on the processor's bus, cards behind a bridge."""
    return sum(
        vendor == _INTEL and kind.startswith((_DISPLAY, _ACCELERATOR)) and not address.startswith("0000:00:")
        for address, vendor, kind in _list_pci_devices(root)
    )


def _count_amd_gpus(root: Path) -> int:
    """Return the number of AMD GPUs with their own memory.

    A processor's integrated graphics share a node with its cores (amdkfd's topology). Without the driver's device, in a
    container to which it was not given, cards without a display are on the bus.
    """
    if not (root / "dev/kfd").exists():
        return sum(vendor == _AMD and kind.startswith(_AMD_CARDS) for _, vendor, kind in _list_pci_devices(root))
    nodes = list((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    if not nodes:
        return 1
    count = 0
    for node in nodes:
        values = dict(line.split(maxsplit=1) for line in read_text(node).splitlines() if len(line.split()) > 1)
        count += int(values.get("simd_count", 0)) > 0 and int(values.get("cpu_cores_count", 0)) == 0
    return count


def _list_pci_devices(root: Path) -> list[tuple[str, str, str]]:
    """Return address, vendor and class of every PCI device."""
    directory = root / "sys/bus/pci/devices"
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [
        (name, read_text(directory / name / "vendor").strip(), read_text(directory / name / "class").strip())
        for name in names
    ]


def _count_entries(directory: Path, pattern: str) -> int:
    try:
        return sum(re.fullmatch(pattern, name) is not None for name in os.listdir(directory))
    except OSError:
        return 0
