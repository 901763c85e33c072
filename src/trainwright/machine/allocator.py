"""What the system is told of this process's memory. Nothing here is needed for a run to be right."""

from __future__ import annotations

import ctypes
import mmap
import sys

_PAGEOUT = 21  # MADV_PAGEOUT of linux/mman.h


def return_freed_memory() -> None:
    """Give what is free inside the heap back to the system, too (malloc_trim(3)); takes milliseconds."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def leave_to_system(address: int, size: int) -> None:
    """Have whole pages of memory, such as those of a mapped file, count to this process no longer.

    They are read again if anything still looks at them, so nothing can be lost (madvise(2), MADV_PAGEOUT).
    """
    if not sys.platform.startswith("linux"):
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _PAGEOUT)
