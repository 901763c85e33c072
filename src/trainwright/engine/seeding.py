"""The random numbers of a pass, which are those of its micro-batch and not those of its rank."""

from __future__ import annotations

import hashlib

import torch


def seed_dropout(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Have the generators that a pass on ``device`` draws from start at a place of the micro-batch's own.

    Not by torch.manual_seed: that formats the stack of its caller for each kind of device that there could be, a
    millisecond a call.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}".encode()).digest()
    place = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(place)
    if device.type == "cuda":
        torch.cuda.manual_seed(place)
