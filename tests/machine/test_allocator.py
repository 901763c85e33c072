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
for number in range(256):
    inner = block(2**20)  # whose gap serves no other of its size
    kept.append(block(2**20))
    libc.free(inner)
    if bounded:
        memory.bound()
print(resident().rss)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize(("program", "least"), [(_GROWING, 2**26), (_ALIGNED, 2**27)], ids=["growing", "of one size"])
def test_gaps_between_blocks_in_use_do_not_stay_resident(program: str, least: int) -> None:
    sizes = {}
    for kind in ("bounded", "unbounded"):
        command = [sys.executable, "-c", _BEGIN + program, kind]
        sizes[kind] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert sizes["bounded"] < sizes["unbounded"] - least, sizes
