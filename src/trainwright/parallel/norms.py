"""Norms of large gradients, in full fp32 precision.

A CPU's norm kernel sums a tensor in fp32 one element after another: the error is 2e-3 at 28M elements, and depends on
how the tensor is sharded. The sum kernel is cascaded: the error is 1e-8, at the same speed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.parallel.constants import NORM_ELEMENTS


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a tensor of any floating dtype, as an fp64 scalar on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_cuda:
        return torch.linalg.vector_norm(flat, dtype=torch.float32).double().square()
    parts = [part.to(torch.float32).square().sum() for part in flat.split(NORM_ELEMENTS)]
    return torch.stack(parts).double().sum()


def squared_norm_of_all(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of ``squared_norm`` over tensors on one device; small tensors are concatenated."""
    sums: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.is_cuda or flat.numel() >= NORM_ELEMENTS:
            sums.append(squared_norm(flat))
            continue
        if elements + flat.numel() > NORM_ELEMENTS:
            sums.append(squared_norm(torch.cat(small)))
            small, elements = [], 0
        small.append(flat)
        elements += flat.numel()
    if small:
        sums.append(squared_norm(torch.cat(small)))
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
