"""What a process keeps of freed memory is bounded."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import psutil
from trainwright.run.process import keep_freed_memory
from trainwright.machine.allocator import ResidentMemory

keep_freed_memory()
memory, small, resident = ResidentMemory(), [], []
for step in range(160):
    large = bytearray(2**24 + step * 2**19)  # as tensors of a step with more tokens than any before
    small.append(bytearray(2**18))  # settles in the gap that the last one has left
    del large
    if sys.argv[1] == "bounded":
        memory.after_passes()
    resident.append(psutil.Process().memory_info().rss)
print(min(resident[-20:]))  # memory is returned every few steps
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_gaps_between_blocks_in_use_do_not_stay_resident() -> None:
    sizes = {}
    for kind in ("bounded", "unbounded"):
        command = [sys.executable, "-c", _PROGRAM, kind]
        sizes[kind] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert sizes["bounded"] < sizes["unbounded"] - 2**26, sizes
