"""Detect this machine: cores, memory, disk, GPUs, their links and precisions. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from trainwright.machine import cgroups
from trainwright.machine.accelerators import Nvml, ask_nvml, explain_unusable, find_other_vendor, read_installed_build
from trainwright.machine.catalog import look_up_card
from trainwright.machine.cgroups import read_text
from trainwright.machine.links import detect_links
from trainwright.machine.machine import Gpu, Machine
from trainwright.machine.measured.contention import count_usable_cores
from trainwright.machine.processor import detect_processor
from trainwright.machine.vendors import Vendor


def detect() -> Machine:
    """Return the machine this process runs on, or the one that ``$TRAINWRIGHT_MACHINE`` describes.

    Raises:
        RequestError: the file does not describe a machine.
    """
    from trainwright.machine.describe import read_described_machine

    return read_described_machine() or _inspect()


def _inspect() -> Machine:
    memory_bytes = _read_memory_bytes()
    cores, core_limit = count_usable_cores(), cgroups.read_cpu_limit()
    gpus, nvml = _list_nvidia_gpus()
    build, listing_error = read_installed_build(), None
    if not gpus and not _are_hidden() and (vendor := find_other_vendor(build)) is not None:
        gpus, listing_error = list_torch_gpus(vendor)
    return Machine(
        hostname=platform.node(),
        cpu_name=_read_cpu_name(),
        cpu_cores=cores if core_limit is None else min(cores, max(1, int(core_limit))),
        memory_bytes=memory_bytes,
        gpus=gpus,
        memory_free_bytes=_read_free_memory_bytes(memory_bytes),
        disk_free_bytes=shutil.disk_usage(".").free,
        processor=detect_processor(),
        unusable=explain_unusable(len(gpus), nvml, build, unlisted=listing_error),
        is_here=True,
    )


def _read_memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, cgroups.read_memory_limit() or total)


def _read_free_memory_bytes(memory_bytes: int) -> int:
    match = re.search(r"MemAvailable:\s*(\d+)", read_text(Path("/proc/meminfo")))  # in KiB
    available = int(match[1]) * 1024 if match else memory_bytes
    free = cgroups.read_free_memory()
    return min(available, memory_bytes if free is None else free)


def _read_cpu_name() -> str:
    for line in read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# The devices of torch's accelerator as JSON. It runs in a process of its own: torch takes seconds to import, and its
# first question of a device creates a context there.
_LIST = """
import json, torch
device = torch.accelerator.current_accelerator()
module = torch.get_device_module(device)
gpus = []
for index in range(module.device_count()):
    values = module.get_device_properties(index)
    if getattr(values, "is_integrated_gpu", False):
        continue
    try:
        free = module.mem_get_info(index)[0]
    except RuntimeError:
        free = None
    gpus.append({
        "name": values.name,
        "memory_bytes": values.total_memory,
        "capability": [getattr(values, "major", 0), getattr(values, "minor", 0)],
        "free_bytes": free,
        "uuid": str(values.uuid),
    })
print(json.dumps(gpus))
"""
_LIST_SECONDS = 120.0


@cache
def list_torch_gpus(vendor: Vendor) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs that the installed torch lists, all of one vendor other than NVIDIA, and why there are none."""
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _LIST], capture_output=True, text=True, errors="replace", timeout=_LIST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return (), f"it did not answer within {_LIST_SECONDS:.0f} s"
    if result.returncode:
        return (), next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "it ended").strip()
    return parse_gpu_rows(vendor, json.loads(result.stdout.splitlines()[-1])), None


def parse_gpu_rows(vendor: Vendor, rows: list[dict[str, Any]]) -> tuple[Gpu, ...]:
    """Return the GPUs of torch's list. Intel's have no compute capability; known cards have that of the catalog."""
    gpus = []
    for row in rows:
        card = look_up_card(row["name"])
        capability = row["capability"] if card is None or vendor != "Intel" else card.capability
        gpus.append(
            Gpu(
                row["name"],
                row["memory_bytes"],
                (capability[0], capability[1]),
                free_bytes=row["free_bytes"],
                link=None if card is None else card.link,
                host_link=None if card is None else card.host_link,
                vendor=vendor,
                uuid=row["uuid"],
            )
        )
    return tuple(gpus)


def _are_hidden() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in ("", "-1")


def _list_nvidia_gpus() -> tuple[tuple[Gpu, ...], Nvml]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible, from NVML, without creating a CUDA context."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if _are_hidden():
        return (), Nvml()
    try:
        import pynvml
    except ImportError as error:  # an installation without its dependencies
        return (), Nvml(error=f"the package nvidia-ml-py cannot be imported ({error})")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), Nvml(error=str(error))
    try:
        count = pynvml.nvmlDeviceGetCount()
        names = map(str, range(count)) if visible is None else visible.split(",")
        handles = [handle for name in names if (handle := _find_visible_gpu(count, name.strip()))]
        return tuple(_read_gpu(handles, index) for index in range(len(handles))), ask_nvml(pynvml)
    except pynvml.NVMLError_GpuIsLost as error:
        return (), Nvml(count, str(error))
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(handles: list[Any], index: int) -> Gpu:
    import pynvml

    handle = handles[index]
    memory = _read_gpu_memory(handle)
    total, free = memory or (machine_bytes := _read_memory_bytes(), _read_free_memory_bytes(machine_bytes))
    link, host_link = detect_links(handles, index)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=total,
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        free_bytes=free,
        link=link,
        host_link=host_link,
        address=_read_address(handle),
        unified=memory is None,
    )


def _read_address(handle: Any) -> str | None:
    """Return the PCI address as sysfs has it: NVML's has a longer domain."""
    import pynvml

    try:
        bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    except pynvml.NVMLError:  # a slice or a virtual GPU
        return None
    text = bus.decode() if isinstance(bus, bytes) else str(bus)
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _read_gpu_memory(handle: Any) -> tuple[int, int] | None:
    """Return the bytes available to programs, and those that are free; None for a GPU without memory of its own."""
    import pynvml

    try:
        # Only the second version reports the driver's memory, which CUDA does not count as the device's.
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return memory.total - memory.reserved, memory.free
    except pynvml.NVMLError:
        pass
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:  # it computes in the machine's memory, as on DGX Spark and Jetson
        return None
    return memory.total, memory.free


def _find_visible_gpu(count: int, name: str) -> Any | None:
    """Return a GPU by its index or the beginning of its UUID. Raises NVMLError_GpuIsLost if that one is lost."""
    import pynvml

    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if int(name) < count else None
    for index in range(count):
        with suppress(pynvml.NVMLError_GpuIsLost):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetUUID(handle).startswith(name):
                return handle
    return None
