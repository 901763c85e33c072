"""The random state of a pass, which depends on its micro-batch and not on its rank."""

from __future__ import annotations

import hashlib

import torch


def seed_dropout(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed the generators that a pass on ``device`` uses, from the micro-batch.

    torch.manual_seed is not used: it formats the stack of its caller for every kind of device, a millisecond a call.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}".encode()).digest()
    place = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(place)
    if device.type == "cuda":
        torch.cuda.manual_seed(place)
