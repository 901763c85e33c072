"""A part of a global tensor: what one rank holds of it and where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shard:
    """``local`` is the block of a tensor of shape ``shape`` that begins at ``offset``.

    ``replicas`` is the number of ranks that hold this very block, and ``replica`` which of them this one is:
    a checkpoint takes each block once.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int = 0
    replicas: int = 1

    @classmethod
    def whole(cls, tensor: torch.Tensor, replica: int = 0, replicas: int = 1) -> Shard:
        """Return a tensor that this rank holds all of."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), replica, replicas)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers that a checkpoint holds, by name."""
    kept = set(module.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in module.named_buffers() if name in kept)
