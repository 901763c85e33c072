"""What this machine has: cores, memory, GPUs and the precisions they do well. Imports no torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver describes it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The machine a run starts on. ``cpu_cores`` and ``memory_bytes`` respect affinity and cgroup limits."""

    hostname: str
    cpu_name: str
    cpu_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @cached_property
    def has_bf16(self) -> bool:
        """Whether bf16 matrix products are computed by the hardware rather than emulated."""
        if self.gpus:
            return all(gpu.capability >= (8, 0) for gpu in self.gpus)
        return bool(_cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})

    def describe(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} x {self.gpus[0].name}, {self.gpus[0].memory_bytes / 2**30:.0f} GiB each"
        return f"{self.cpu_name}, {self.cpu_cores} cores, {self.memory_bytes / 2**30:.0f} GiB"


def detect() -> Machine:
    """Look at the machine this process runs on."""
    return Machine(
        hostname=platform.node(),
        cpu_name=_cpu_name(),
        cpu_cores=_cpu_cores(),
        memory_bytes=_memory_bytes(),
        gpus=_gpus(),
    )


def _cpu_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _read("/sys/fs/cgroup/cpu.max").split()
    if len(limit) == 2 and limit[0].isdigit():
        cores = min(cores, max(1, int(limit[0]) // int(limit[1])))
    return cores


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu_flags() -> set[str]:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> tuple[Gpu, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible, by NVML: no CUDA context is made in this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if visible is not None:
            handles = [
                handle for name in visible.split(",") if (handle := _visible_gpu(handles, name.strip()))
            ]
        return tuple(
            Gpu(
                name=pynvml.nvmlDeviceGetName(handle),
                memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                capability=pynvml.nvmlDeviceGetCudaComputeCapability(handle),
            )
            for handle in handles
        )
    finally:
        pynvml.nvmlShutdown()


def _visible_gpu(handles: list[object], name: str) -> object | None:
    import pynvml

    if name.isdigit():
        return handles[int(name)] if int(name) < len(handles) else None
    return next((h for h in handles if pynvml.nvmlDeviceGetUUID(h).startswith(name)), None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
