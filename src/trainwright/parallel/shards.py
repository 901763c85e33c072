"""The part of a global tensor that one rank holds, and its position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Shard:
    """The block ``local`` of a tensor of shape ``shape``, starting at ``offset``.

    ``replicas`` is the number of ranks that hold the same block, and ``replica`` the index of this one; a checkpoint
    writes each block once.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int = 0
    replicas: int = 1

    @classmethod
    def full(cls, tensor: torch.Tensor, replica: int = 0, replicas: int = 1) -> Shard:
        """Return a tensor that this rank holds in full."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), replica, replicas)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers that a checkpoint holds, by name."""
    kept = set(module.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in module.named_buffers() if name in kept)
