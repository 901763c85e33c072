"""Hints to the system about this process's memory; runs are correct without them."""

from __future__ import annotations

import ctypes
import mmap
import sys

_PAGEOUT = 21  # MADV_PAGEOUT of linux/mman.h


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
