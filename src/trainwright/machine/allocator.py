"""The C library's allocator, which keeps the memory of freed tensors for the next ones."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give what is free inside the heap back to the system, too (malloc_trim(3)); takes milliseconds."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
