"""The kernels that a simulated program launches, and the sizes of memory that a tensor's bytes do not show.

Imports no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# "expansion": dequantization.
KernelKind = Literal["product", "attention", "elementwise", "reduction", "copy", "expansion"]


class Kernel(NamedTuple):
    """One kernel launch on the device.

    ``operation``: the operation it is part of. ``read``, ``written``: bytes of the tensors it reads and writes.
    ``flops``: of products and attention. A product is ``times`` products of [m, k] with [k, n]. ``generation``: of
    FlashAttention.
    """

    operation: str
    kind: KernelKind
    read: int
    written: int
    flops: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    times: int = 0
    generation: int = 2


def product_workspace(m: int, n: int, k: int, transposed: bool) -> int:
    """Estimate the bytes that oneDNN's bf16 products use per thread.

    They are a block of fp32 sums, the packed part of the second matrix, and of the first if it is transposed
    (src/cpu/x64/matmul/brgemm_matmul_utils).
    """
    rows, depth = min(m, 256), min(-(-k // 32) * 32, 1024)
    return rows * min(n, 64) * 4 + depth * 64 * 2 + (rows * depth * 2 if transposed else 0) + 1024


def excess_when_pinned(size: int) -> int:
    """Return the bytes by which pinned memory for ``size`` bytes exceeds them.

    torch rounds it up to a power of two (torch.cuda.memory.host_memory_stats).
    """
    return (1 << (size - 1).bit_length()) - size if size > 1 else 0
