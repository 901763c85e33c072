"""Measure collectives between the processes of a setting, and their overlap with computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from trainwright.doctor.calibrate_cases import Case, Run
from trainwright.parallel.world import World

_BYTES = {"cpu": (2**16, 2**19, 2**22, 2**24, 2**26), "cuda": (2**14, 2**18, 2**22, 2**26, 2**29)}
_HELD_OUT_BYTES = {"cpu": (2**18, 2**21, 2**25), "cuda": (2**20, 2**24, 2**28)}
_OVERLAP_BYTES = {"cpu": 2**24, "cuda": 2**28}
_WIDTH = {"cpu": 512, "cuda": 4096}
_ROUNDS = 3


def collective_cases(world: World) -> Iterator[Case]:
    """Yield the collectives that strategies use, by the bytes of the full tensor."""
    if world.size == 1:
        return
    kind = world.device.type
    for count, held_out in [(n, False) for n in _BYTES[kind]] + [(n, True) for n in _HELD_OUT_BYTES[kind]]:
        for name, build in _BUILDERS.items():
            yield Case(f"collective/{name}", (count,), held_out, partial(build, world, count), joint=True)


def measure_overlap(world: World) -> float:
    """Return the share of an all-reduce that overlaps with matrix products of the same duration, from 0 to 1."""
    if world.size == 1:
        return 0.0
    reduce = _all_reduce(world, _OVERLAP_BYTES[world.device.type])
    width = _WIDTH[world.device.type]
    left = torch.randn(width, width, device=world.device)
    alone = min(_seconds(world, reduce) for _ in range(_ROUNDS))
    once = min(_seconds(world, lambda: torch.mm(left, left)) for _ in range(_ROUNDS))
    count = max(1, round(world.broadcast(alone / once)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(left, left)

    tensor = torch.zeros(_OVERLAP_BYTES[world.device.type] // 4, device=world.device)

    def both() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        assert work is not None
        work.wait()

    computing = min(_seconds(world, compute) for _ in range(_ROUNDS))
    together = min(_seconds(world, both) for _ in range(_ROUNDS))
    hidden = (alone + computing - together) / min(alone, computing)
    return min(1.0, max(0.0, float(world.broadcast(hidden))))


def _seconds(world: World, run: Callable[[], object]) -> float:
    run()
    _finish(world)
    begun = time.perf_counter()
    run()
    _finish(world)
    return time.perf_counter() - begun


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier()


def _all_reduce(world: World, count: int) -> Run:
    tensor = torch.zeros(count // 4, device=world.device)
    return lambda: dist.all_reduce(tensor)


def _all_gather(world: World, count: int) -> Run:
    part = torch.zeros(count // 4 // world.size, device=world.device)
    whole = part.new_empty(len(part) * world.size)
    return lambda: dist.all_gather_single(whole, part)


def _reduce_scatter(world: World, count: int) -> Run:
    part = torch.zeros(count // 4 // world.size, device=world.device)
    whole = part.new_zeros(len(part) * world.size)
    return lambda: dist.reduce_scatter_single(part, whole)


def _broadcast(world: World, count: int) -> Run:
    tensor = torch.zeros(count // 4, device=world.device)
    return lambda: dist.broadcast(tensor, src=0)


_BUILDERS: dict[str, Callable[[World, int], Run]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}
