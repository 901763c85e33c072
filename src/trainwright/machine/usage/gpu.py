"""What a GPU does now, as NVIDIA's management library (NVML) tells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

# Reasons of a low clock (nvml.h, nvmlClocksEventReason...). An idle GPU (0x1) is not limited by anything.
POWER_LIMIT, POWER_BRAKE, HARDWARE, HEAT, HARDWARE_HEAT = 0x4, 0x80, 0x8, 0x20, 0x40
REASONS = {
    0x2: "a clock that somebody has set",
    POWER_LIMIT: "its power limit",
    HARDWARE: "a hardware slowdown",
    0x10: "the clocks of other GPUs",
    HEAT: "heat (driver)",
    HARDWARE_HEAT: "heat (hardware)",
    POWER_BRAKE: "the power brake of the machine",
    0x100: "the clock of its display",
}
# A clock is low below this part of the highest one; GPUs at full load run a little below it.
_LOW_CLOCK, _CLOCK_OF_FAULT = 0.8, 0.95


def gpu_of(address: str) -> dict[str, Any]:
    """Return what NVML tells about the GPU at a PCI address: see `gpu_state`. Empty without NVML or such a GPU."""
    try:
        import pynvml

        return gpu_state(pynvml, _handle(address))
    except Exception:  # of a library that is missing, damaged, or without a driver
        return {}


def gpu_state(library: Any, handle: Any) -> dict[str, Any]:
    """Return what a GPU tells, without what it does not tell.

    ``used`` is the share of the time in which it computed; ``memory`` and ``total_memory`` are in bytes,
    ``power`` is in watts, clocks are in MHz, ``temperature`` is in degrees Celsius; ``limited`` names what lowers its
    clock.
    """
    questions: dict[str, Callable[[], Any]] = {
        "used": lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": lambda: library.nvmlDeviceGetMemoryInfo(handle).used,
        "total_memory": lambda: library.nvmlDeviceGetMemoryInfo(handle).total,
        "power": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000,
        "clock": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        "highest_clock": lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM),
        "temperature": lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
        "limited": lambda: reasons(clock_reasons(library, handle)),
    }
    return _answers(library, questions)


def all_gpus() -> list[dict[str, Any]]:
    """Return what NVML tells about every GPU of this machine, see `gpu_state`; empty without NVML or a GPU.

    Each also has its ``name``, and its ``processes``: by pid, the bytes of its memory that they use, None where NVML
    does not tell.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # see `gpu_of`
        return []
    try:
        return [_gpu_at(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu_at(library: Any, index: int) -> dict[str, Any]:
    try:
        handle = library.nvmlDeviceGetHandleByIndex(index)
    except library.NVMLError as error:
        return {"name": f"not readable: {error}"}
    questions: dict[str, Callable[[], Any]] = {
        "name": lambda: library.nvmlDeviceGetName(handle),
        "processes": lambda: {
            each.pid: each.usedGpuMemory for each in library.nvmlDeviceGetComputeRunningProcesses(handle)
        },
    }
    return gpu_state(library, handle) | _answers(library, questions)


def _answers(library: Any, questions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except (library.NVMLError, AttributeError):  # neither every GPU nor every release has each
            continue
    return answers


def clock_reasons(library: Any, handle: Any) -> int:
    """Return the bits of what lowers the clock of a GPU. Raises NVMLError if it does not tell."""
    try:
        bits = library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (library.NVMLError, AttributeError):  # older drivers and releases have the older name
        bits = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return int(bits)


def reasons(bits: int) -> list[str]:
    """Return in words what lowers the clock of a GPU."""
    return [words for bit, words in REASONS.items() if bits & bit]


def low_clock(state: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return by which part a GPU's clock is below its highest one, and why in words; None if nothing limits it.

    Args:
        state: see `gpu_state`.
    """
    now, highest, limited = state.get("clock"), state.get("highest_clock"), state.get("limited")
    if not now or not highest or limited == []:  # one that is idle lowers its clock by itself
        return None
    is_fault = any(REASONS[bit] in (limited or ()) for bit in (POWER_BRAKE, HARDWARE, HEAT, HARDWARE_HEAT))
    if now >= (_CLOCK_OF_FAULT if is_fault else _LOW_CLOCK) * highest:
        return None
    why = f", limited by {' and '.join(limited)}" if limited else ""
    heat = f", at {state['temperature']} °C" if "temperature" in state else ""
    return 1 - now / highest, f"the process's GPU runs at {now} of {highest} MHz{why}{heat}"


@functools.cache
def _handle(address: str) -> Any:
    import pynvml

    pynvml.nvmlInit()  # until the process ends
    return pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
