"""Whether every rank has room for a whole copy of a model that is sharded otherwise."""

from __future__ import annotations

import torch

from trainwright.machine.detect import detect
from trainwright.parallel.world import World

# Of what is free; the rest is for the key-value cache and for what is computed.
_USABLE = 0.8


def no_room(world: World, wanted: int, room: int | None) -> str | None:
    """Why ranks cannot have ``wanted`` bytes more each, the same on all of them; None where they can.

    Args:
        room: bytes that this rank may take; None: most of what is free. Every rank calls this.
    """
    rooms = [each for (each,) in world.gather_floats([_USABLE * _free(world) if room is None else room])]
    least = min(rooms)
    if wanted <= least:
        return None
    rank = rooms.index(least)
    return f"all weights together take {_size(wanted)}, and rank {rank} has room for {_size(least)}"


def _free(world: World) -> int:
    """Bytes that this rank could have on its device now; of a host's memory, its share."""
    if world.device.type == "cuda":
        kept = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return int(torch.cuda.mem_get_info(world.device)[0]) + kept
    return detect().usable_bytes // world.local_size


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
