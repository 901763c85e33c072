"""Norms of large gradients, to the digits fp32 has.

A CPU's kernel adds up a whole tensor in fp32 one element after the other: off by 2e-3 at 28M elements, and by another
amount for every way the tensor is cut into shards. Norms of short blocks, added in fp64, are right to 1e-7 anywhere.
"""

from __future__ import annotations

import torch

_BLOCK = 4096
_CACHE_ELEMENTS = 2**18  # bf16 is converted a cache's worth at a time instead of all at once


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a tensor of any floating dtype, as an fp64 scalar on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_cuda:
        return torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
    total = torch.zeros((), dtype=torch.float64)
    for part in flat.split(len(flat) if flat.dtype == torch.float32 else _CACHE_ELEMENTS) if len(flat) else ():
        part = part.float()
        whole = len(part) // _BLOCK * _BLOCK
        for rows in (part[:whole].view(-1, _BLOCK), part[None, whole:]):
            total += torch.linalg.vector_norm(rows, dim=1).double().square().sum()
    return total
