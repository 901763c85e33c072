"""The memory of this process, and hints to the system about it; runs are correct without them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import psutil

_PAGEOUT = 21  # MADV_PAGEOUT of linux/mman.h
_GROWTH = 1.05  # of resident memory, from which on free memory is returned


class ResidentMemory:
    """The resident memory of this process, and the bound on what the allocator keeps of freed memory.

    Memory of freed tensors is kept for the next ones, which is fast. Where their sizes vary, small blocks settle in the
    gaps, and the next large block needs new memory: resident memory grows though no more is in use.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._base = 0  # in the first step since memory was returned; 0 before it

    def after_passes(self) -> int:
        """Return the resident bytes in this step; if they have grown by a twentieth, free memory is returned."""
        resident = int(self._process.memory_info().rss)
        if not self._base:
            self._base = resident
        elif resident > _GROWTH * self._base:
            return_freed_memory()
            self._base = 0
        return resident


def peak_resident(ru_maxrss: int) -> int:
    """Return the peak of a process's memory in bytes: getrusage(2) counts KiB, on macOS bytes."""
    return ru_maxrss if sys.platform == "darwin" else 1024 * ru_maxrss


def return_freed_memory() -> None:
    """Return free heap memory to the system (malloc_trim(3)); takes milliseconds."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def leave_to_system(address: int, size: int) -> None:
    """Release whole pages of memory, such as those of a mapped file, from this process.

    They are read again on access, so nothing is lost (madvise(2), MADV_PAGEOUT).
    """
    if not sys.platform.startswith("linux"):
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _PAGEOUT)
