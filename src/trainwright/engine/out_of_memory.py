"""Out of memory: distinguished from other errors, and cleaned up. How a run reacts: policies/micro_batch_halving.py."""

from __future__ import annotations

import gc
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import psutil

from trainwright.errors import TrainingError
from trainwright.machine.allocator import convert_peak_resident, return_freed_memory
from trainwright.utils.text import format_bytes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Messages of CUDA, its libraries, torch's CPU allocator, C++ and the kernel.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can('t|not) allocate memory|not enough memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE
)
_REQUESTED_CUDA = re.compile(
    r"tried to allocate ([\d.]+ \w+).*?total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", re.I
)
_REQUESTED_CPU = re.compile(r"tried to allocate (\d+) bytes")
_LIMITS = {"RLIMIT_AS": "ulimit -v", "RLIMIT_DATA": "ulimit -d"}


class OutOfMemory(TrainingError):
    """Memory ran out in training on a rank that the others wait for, or with nothing left to halve.

    Attributes:
        detail: the requested and the available memory.
        step: the step that failed, from 1.
        rows: of its largest micro-batch.
    """

    def __init__(self, message: str, *, detail: str, step: int, rows: int) -> None:
        super().__init__(message)
        self.detail = detail
        self.step = step
        self.rows = rows


@dataclass(frozen=True)
class MemoryShortage:
    """An out-of-memory error: the requested and the available memory."""

    detail: str


def catch_shortage(work: Callable[[], T]) -> T | MemoryShortage:
    """Return the result of ``work``, or its out-of-memory error after freeing what it held."""
    try:
        return work()
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        shortage = MemoryShortage(_describe_shortage(error))
    # Release here: until now the exception's frames held every activation.
    release()
    return shortage


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the exception is an out-of-memory error of a GPU or the host."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and _OUT_OF_MEMORY.search(str(error)) is not None


def release() -> None:
    """Free unreferenced memory, including allocator caches."""
    import torch

    gc.collect()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and torch.get_device_module(device).is_initialized():
        torch.accelerator.empty_cache()
    return_freed_memory()


def read_peak_memory(device: torch.device) -> float:
    """Return the peak bytes of this process: allocated on a GPU, resident on a CPU."""
    import torch

    if device.type != "cpu":
        return float(torch.accelerator.max_memory_allocated(device))
    return float(convert_peak_resident(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _describe_shortage(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if match := _REQUESTED_CUDA.search(text):
        request, capacity, free = match.groups()
        return f"{request} requested, {free} of {capacity} free"
    match = _REQUESTED_CPU.search(text)
    request = f"{format_bytes(int(match[1]))} requested" if match else text[:200] or "no memory"
    return ", ".join(
        [request, f"{format_bytes(psutil.virtual_memory().available)} free on the machine", *_list_limits()]
    )


def _list_limits() -> list[str]:
    """Return the memory limits of the user or the system on this process, if set."""
    limits = []
    for name, command in _LIMITS.items():
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(f"a process is limited to {format_bytes(limit)} ({command})")
    return limits
