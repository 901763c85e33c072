"""A hash of weights, by which a resumed run knows that what it does not train is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import torch

from trainwright.parallel.world import World

_PART = 2**22  # bytes of a tensor to sum at a time


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]], leave_out: Collection[str], world: World) -> str:
    """Return a hash of all weights, except those named in ``leave_out``. All ranks must call it."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        if world.is_main and name not in leave_out:
            digest.update(f"{name} {_sums(tensor)}".encode())
    result: str = world.broadcast(digest.hexdigest()[:32])
    return result


def _sums(tensor: torch.Tensor) -> list[int]:
    """Return integer sums of a tensor's bits, which are the same in any order and on any device."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    parts = flat.split(_PART)
    return [int((part.view(torch.int32) if part.numel() % 4 == 0 else part).sum(dtype=torch.int64)) for part in parts]
