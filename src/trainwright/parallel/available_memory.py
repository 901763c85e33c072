"""Check whether every rank has memory for a copy: of a full model on its device, or of its state on the host."""

from __future__ import annotations

import torch

from trainwright.machine.detect import detect
from trainwright.parallel.constants import USABLE
from trainwright.parallel.world import World


def memory_shortage(world: World, required: int, available: int | None) -> str | None:
    """Return why ranks cannot allocate ``required`` bytes more each, the same on all; None if they can.

    Every rank must call this.

    Args:
        available: bytes that this rank may use; None: most of the free memory.
    """
    available_by_rank = [
        each for (each,) in world.gather_floats([USABLE * free_bytes(world) if available is None else available])
    ]
    least = min(available_by_rank)
    if required <= least:
        return None
    rank = available_by_rank.index(least)
    return f"the full weights need {_size(required)}, but rank {rank} has only {_size(least)} available"


def free_bytes(world: World) -> int:
    """Return the free bytes on this rank's device, or its share of a host's memory."""
    if world.device.type != "cpu":
        memory = torch.accelerator
        unused = memory.memory_reserved(world.device) - memory.memory_allocated(world.device)
        return memory.get_memory_info(world.device)[0] + unused
    return _share_of_host(world)


def fits_host(world: World, required: int) -> bool:
    """Return whether each rank can allocate its ``required`` bytes in its host's memory, the same on all.

    Every rank must call this.
    """
    return all(short <= 0 for (short,) in world.gather_floats([required - USABLE * _share_of_host(world)]))


def _share_of_host(world: World) -> int:
    return detect().usable_bytes // world.local_size


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
