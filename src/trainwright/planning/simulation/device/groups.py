"""Process groups of ranks that are not there: rank 0 of a world whose other ranks are taken to be like it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from trainwright.planning.simulation.device.cuda import SimulatedGpu


@dataclass
class Rank:
    """The simulated rank: always rank 0 of ``world`` ranks, ``local`` of them on its node."""

    card: SimulatedGpu
    world: int = 1
    local: int = 1


def install(rank: Rank) -> None:
    """Make every process group a fake one, this process rank 0 of ``rank.world``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    begin, subgroup = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin("fake", store=FakeStore(), rank=0, world_size=rank.world)

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return subgroup(ranks, backend="fake")

    replaced: dict[str, Any] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "barrier": lambda *args, **kwargs: None,
    }
    for name, value in replaced.items():
        setattr(dist, name, value)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, value)
    for name in ("__init__", "__getitem__", "_create_sub_mesh", "_flatten"):
        setattr(DeviceMesh, name, _with_values(getattr(DeviceMesh, name)))
    DeviceMesh.from_group = staticmethod(_with_values(DeviceMesh.from_group))  # type: ignore[method-assign]
    mesh: Any = device_mesh
    mesh.init_device_mesh = dist.init_device_mesh = _with_values(mesh.init_device_mesh)


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with real tensors on the host: a mesh reads the values of its own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
