"""What a process, its machine and its GPU do now, for the ledger of a run."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


class Sampler:
    """Sample this process and its machine.

    Args:
        gpu: PCI address of the GPU of this process.
    """

    def __init__(self, gpu: str | None = None) -> None:
        self._gpu = gpu
        self._process = psutil.Process()

    def __call__(self) -> dict[str, Any]:
        """Return what they do; what the system does not tell is left out.

        ``cpu`` is in cores and ``host_cpu`` a share of all cores, both since the last call by this thread; memory is
        in bytes, ``clock`` in MHz, ``power`` in watts, ``temperature`` in degrees Celsius.
        """
        found: dict[str, Any] = {}
        with suppress(psutil.Error, OSError):
            found["cpu"] = round(self._process.cpu_percent() / 100, 3)
            found["host_cpu"] = round(psutil.cpu_percent() / 100, 3)
            found["memory"] = self._process.memory_info().rss
            found["host_memory_free"] = psutil.virtual_memory().available
        if (clock := processor_clock()) is not None:
            found["clock"] = round(clock[0])
        if self._gpu is not None and (gpu := gpu_of(self._gpu)):
            found["gpu"] = gpu
        return found


def process_age() -> float:
    """Return the seconds since this process was created."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        created = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine started (proc_pid_stat(5))
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - created)
    except (OSError, AttributeError):  # not Linux; there, psutil rounds no time to whole seconds
        return max(0.0, time.time() - psutil.Process().create_time())


def processor_clock() -> tuple[float, float] | None:
    """Return the mean clock of the processors and the highest possible one, in MHz; None if they are not known."""
    with suppress(OSError, RuntimeError, NotImplementedError, AttributeError):
        clock = psutil.cpu_freq()
        if clock is not None and clock.current:
            return clock.current, clock.max
    return None


def gpu_of(address: str) -> dict[str, Any]:
    """Return what NVML tells about the GPU at a PCI address: ``used`` is the share of the time it computed."""
    import pynvml

    found: dict[str, Any] = {}
    try:
        handle = _handle(address)
    except pynvml.NVMLError:
        return found
    asked: dict[str, Callable[[], Any]] = {
        "used": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "clock": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "highest_clock": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }
    for name, ask in asked.items():
        with suppress(pynvml.NVMLError):
            found[name] = ask()
    return found


@functools.cache
def _handle(address: str) -> Any:
    import pynvml

    pynvml.nvmlInit()  # until the process ends
    return pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
