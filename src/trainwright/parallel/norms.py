"""Norms of large gradients, in full fp32 precision.

A CPU's norm kernel sums a tensor in fp32 one element after another: the error is 2e-3 at 28M elements, and depends on
how the tensor is sharded. The sum kernel is cascaded: the error is 1e-8, at the same speed. GPUs have a norm kernel for
many tensors at once, which sums pieces of fixed size too.

Either way a tensor's sum depends on its own elements only, in an order that is the same on any number of processes, and
the sums of tensors are added in fp64. Tensors that every process holds in full thus have the same norm, bit for bit, on
all of them; of sharded tensors the fp32 sums of pieces differ in their last digit with the number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.parallel.constants import CACHED_ELEMENTS


def squared_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of tensors of any floating dtypes on one device, as an fp64 scalar on that device."""
    on_host: list[torch.Tensor] = []
    on_device: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        part = tensor.detach()
        if part.device.type == "cpu":
            on_host.append(part.reshape(-1))
        elif part.numel():
            on_device.setdefault(part.dtype, []).append(part)
    return _of_many(on_device) if on_device else _by_the_sum_kernel(on_host)


def _of_many(tensors: dict[torch.dtype, list[torch.Tensor]]) -> torch.Tensor:
    """Return the same for tensors on a GPU, by dtype: the kernel takes one dtype at a time, and is slow for several."""
    norms = [norm for alike in tensors.values() for norm in torch._foreach_norm(alike, dtype=torch.float32)]
    return torch.stack(norms).double().square().sum()


def _by_the_sum_kernel(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the same for flat tensors on a CPU; small ones are concatenated."""
    sums: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    elements = 0
    for flat in tensors:
        if flat.numel() >= CACHED_ELEMENTS:
            sums.append(_sum_of_squares(flat))
            continue
        if elements + flat.numel() > CACHED_ELEMENTS:
            sums.append(_sum_of_squares(torch.cat(small)))
            small, elements = [], 0
        small.append(flat)
        elements += flat.numel()
    if small:
        sums.append(_sum_of_squares(torch.cat(small)))
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def _sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    parts = [part.to(torch.float32).square().sum() for part in flat.split(CACHED_ELEMENTS)]
    return torch.stack(parts).double().sum()
