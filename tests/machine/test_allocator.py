"""What a process keeps of freed memory is bounded."""

import subprocess
import sys

import pytest

_BEGIN = """
import ctypes
import sys
import psutil
from trainwright.run.process import keep_freed_memory
from trainwright.machine.allocator import ResidentMemory

keep_freed_memory()
memory, kept = ResidentMemory(), []
bounded = sys.argv[1] == "bounded"
resident = psutil.Process().memory_info
libc = ctypes.CDLL(None)

def block(size):  # as torch allocates a tensor
    address = ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(64), ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    return address
"""
_GROWING = """
sizes = []
for step in range(160):
    large = block(2**24 + step * 2**19)  # as in a step with more tokens than any before
    kept.append(block(2**18))  # settles in the gap that the last one has left
    libc.free(large)
    if bounded:
        memory.bound()
    sizes.append(resident().rss)
print(min(sizes[-20:]))  # memory is returned every few steps
"""
_ALIGNED = """
memory.bound()
begin = resident().rss
for number in range(256):
    inner = block(2**20)  # whose gap serves no other of its size
    kept.append(block(2**20))
    libc.free(inner)
    if bounded:
        memory.bound()
print(resident().rss - begin)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_gaps_between_growing_blocks_do_not_stay_resident() -> None:
    assert _size(_GROWING, "bounded") < _size(_GROWING, "unbounded") - 2**26


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_gaps_of_aligned_blocks_do_not_stay_resident() -> None:
    in_use, kept = 2**28, 2**26
    # Twice as much without the bound, but where the heap begins at an address that leaves no gaps.
    assert _size(_ALIGNED, "bounded") < in_use + kept + 2**24


def _size(program: str, kind: str) -> int:
    command = [sys.executable, "-c", _BEGIN + program, kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
