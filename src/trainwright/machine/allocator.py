"""The memory of this process, and hints to the system about it; runs are correct without them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import psutil

_PAGEOUT = 21  # MADV_PAGEOUT of linux/mman.h
# Of freed memory, what is kept for the next tensors: as much as a part of the memory in use, within these bounds.
_KEPT_PART, _KEPT_LEAST, _KEPT_MOST = 4, 64 * 2**20, 384 * 2**20


class ResidentMemory:
    """The resident memory of this process, and the bound on what the allocator keeps of freed memory.

    Memory of freed tensors is kept for the next ones, which is fast. But glibc needs more bytes than an aligned block
    has (_int_memalign of malloc.c), so what a tensor leaves between tensors in use serves no other of its size, and
    small blocks settle in it. Where blocks are recomputed, resident memory would become a multiple of what is in use.
    Memory that is returned takes time to have again: a step of a 135M-parameter model takes an eighth longer on some
    processors if at most 256 MiB are kept. Between 384 and 512 MiB no difference was measured.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._others: int | None = None  # resident bytes outside of the heap
        self._most = 0  # bytes that were in use in the heap
        self._enough = 0  # resident bytes up to which no more is kept than may be

    def bound(self) -> int:
        """Return free memory to the system if more is resident than the most that was in use and what may be kept.

        Returns:
            The bytes that were resident before.
        """
        resident = self._resident()
        if resident <= self._enough or (usage := _read_bytes_in_use()) is None:
            return resident
        self._most = max(self._most, usage)
        reserve = compute_kept_limit(self._most)
        if self._others is None or resident - self._others > self._most + reserve:
            return_freed_memory()
            self._others = self._resident() - usage
        self._enough = self._others + self._most + reserve
        return resident

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


def compute_kept_limit(used: int) -> int:
    """Return how many bytes of freed memory a process keeps that has ``used`` bytes in use."""
    return min(_KEPT_MOST, max(_KEPT_LEAST, used // _KEPT_PART))


_COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _HeapState(ctypes.Structure):
    """``struct mallinfo2`` of mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


def _read_bytes_in_use() -> int | None:
    """Return the bytes of blocks in use; None if the C library does not tell."""
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallinfo2"):
        return None
    libc.mallinfo2.restype = _HeapState
    return int(libc.mallinfo2().uordblks)


def convert_peak_resident(ru_maxrss: int) -> int:
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
