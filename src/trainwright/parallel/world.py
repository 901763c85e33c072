"""The processes of a run as seen by one of them: its rank, its device, and a few collectives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch's default for gloo; NCCL's is 10 minutes, which a checkpoint on slow storage may exceed.
TIMEOUT = timedelta(minutes=30)


class StopRequested(Exception):
    """Raised on all ranks at once when a stop was requested on any of them, to interrupt their common work."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    ``stop_requested``: whether a stop was requested on this rank; None disables interruption.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    stop_requested: Callable[[], bool] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all ranks, in float64 so that counts stay exact."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        """Return the values of every rank, in rank order, on every rank; all ranks must pass the same number."""
        if self.size == 1:
            return [values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = tensor.new_empty(self.size * len(values))
        dist.all_gather_into_tensor(everyone, tensor)
        rows: list[list[float]] = everyone.view(self.size, -1).tolist()
        return rows

    def gather(self, value: Any) -> list[Any]:
        """Return a small object of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def check_stop(self) -> None:
        """Interrupt long work if a stop was requested. All ranks must call this at the same points, or none.

        Raises:
            StopRequested: on every rank, if a stop was requested on any.
        """
        if self.stop_requested is not None and any(
            stop for (stop,) in self.gather_floats([float(self.stop_requested())])
        ):
            raise StopRequested

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@dataclass(frozen=True)
class RankInfo:
    """The rank and device that a launcher assigned to this process.

    Attributes:
        gpu: index of its GPU among those visible to this process; 0 if each process only sees its own.
        store: the store of a completed rendezvous; None: rendezvous at MASTER_ADDR and MASTER_PORT.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    gpu: int
    store: dist.Store | None = None

    @classmethod
    def from_variables(cls) -> RankInfo:
        """Read torchrun's variables; a process started without them has a world size of 1."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            size=size,
            local_rank=local_rank,
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(size))),
            gpu=local_rank,
        )


def join(device_type: str, rank_info: RankInfo | None = None, timeout: timedelta = TIMEOUT) -> World:
    """Join the process group of the launcher's processes; a world size of 1 needs none.

    Without a ``rank_info`` the environment variables are read.
    """
    rank_info = rank_info or RankInfo.from_variables()
    device = torch.device(device_type, rank_info.gpu) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank_info.size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if rank_info.store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            rank_info.store.set_timeout(timeout)
            store = dist.PrefixStore("process group", rank_info.store)
            dist.init_process_group(
                backend, store=store, rank=rank_info.rank, world_size=rank_info.size, timeout=timeout
            )
    return World(rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size, device)


def ensure_process_group(world: World) -> None:
    """Create a process group of one if there is none, for libraries that require one."""
    if not dist.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
