"""The processes of a run as seen by one of them: its rank, its device, a few collectives, and the objects they carry.

Objects are exchanged as JSON (``dumps``, ``loads``): what another rank sends is data, and nothing in it is called.
Floats keep their bits (json writes their shortest exact form), and arrays and tensors those of their elements.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainwright.data.stream.batch import copy_to_device
from trainwright.machine.detect import detect
from trainwright.parallel.constants import USABLE
from trainwright.utils import heartbeat

# torch's default for gloo; NCCL's is 10 minutes.
TIMEOUT = timedelta(minutes=30)
# Of exchanges between hosts, before which one rank may verify a checkpoint or write an export while the others wait. A
# rank that fails or is lost ends the wait at once.
HOST_TIMEOUT = timedelta(days=2)


class StopRequested(Exception):
    """Raised on all ranks at once when a stop was requested on any of them, to interrupt their common work."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    Attributes:
        stop_requested: whether a stop was requested on this rank; None disables interruption.
        timeout: of collectives, for the groups of some of the ranks.
        hosts: the group for objects and barriers, which waits for ``HOST_TIMEOUT``; None: the default group.
        alone: the other ranks do not exist, because the run is simulated; collectives do as if they were like this one.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    stop_requested: Callable[[], bool] | None = None
    timeout: timedelta = TIMEOUT
    hosts: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all ranks, in float64 so that counts stay exact."""
        if self.size == 1:
            return values
        tensor = copy_to_device(_to_float64_tensor(values), self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def sum_tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, in float64 on the device of the run; the host does not wait."""
        total = copy_to_device(value.to(torch.float64, copy=True), self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        """Return the values of every rank, in rank order, on every rank; all ranks must pass the same number."""
        if self.size == 1:
            return [values]
        return self.gather_rows(copy_to_device(_to_float64_tensor(values), self.device)).tolist()

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return the vectors of every rank [size, n], in rank order, on every rank; the host does not wait."""
        if self.size == 1:
            return row[None]
        everyone = row.new_empty(self.size * len(row))
        dist.all_gather_single(everyone, row)
        return everyone.view(self.size, -1)

    def gather(self, value: Any, *types: type) -> list[Any]:
        """Return a small object of every rank, in rank order, on every rank.

        Args:
            types: dataclasses and named tuples in it, beside plain data, arrays and tensors (see ``dumps``).
        """
        if self.size == 1 or self.alone:
            return [value] * self.size
        content = dumps(value, *types)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self.hosts)
        longest = max(int(size) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, _to_byte_tensor(content.ljust(longest)), group=self.hosts)
        return [loads(part.numpy().tobytes(), *types) for part in parts]  # padded with spaces

    def broadcast(self, value: Any, *types: type) -> Any:
        """Return rank 0's value on every rank; ``types`` as in ``gather``."""
        if self.size == 1 or self.alone:
            return value
        content = _to_byte_tensor(dumps(value, *types)) if self.is_main else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self.hosts)
        content = content if self.is_main else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self.hosts)
        return value if self.is_main else loads(content.numpy().tobytes(), *types)

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
        """Wait for all ranks; work that was started on devices may still run."""
        if self.size > 1:
            dist.barrier(group=self.hosts)


def _to_byte_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _to_float64_tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class RankInfo:
    """The rank and device that a launcher assigned to this process.

    Attributes:
        gpu: index of its GPU among those visible to this process; 0 if each process only sees its own.
        store: the store of a completed rendezvous; None: rendezvous at MASTER_ADDR and MASTER_PORT.
        alone: the other ranks do not exist, because the run is simulated.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    gpu: int
    store: dist.Store | None = None
    alone: bool = False

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
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank_info.gpu)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    hosts = None
    if rank_info.size > 1:
        if rank_info.alone:
            dist.init_process_group(choose_backends(device), timeout=timeout)
        else:
            rank, size = rank_info.rank, rank_info.size
            store = _store_with_all(rank_info)
            store.set_timeout(timeout)
            dist.init_process_group(choose_backends(device), store=store, rank=rank, world_size=size, timeout=timeout)
        hosts = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
    ranks = rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size
    return World(*ranks, device, timeout=timeout, hosts=hosts, alone=rank_info.alone)


def _store_with_all(rank_info: RankInfo) -> dist.Store:
    """Return the store of the process group once all ranks are there, of which one may load a model for long."""
    rank, size, store = rank_info.rank, rank_info.size, rank_info.store
    with heartbeat.report_waiting():
        if store is None:  # rank 0 may host it
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=HOST_TIMEOUT))
        store = dist.PrefixStore("process group", store)
        store.set(f"joins/{rank}", "")
        store.wait([f"joins/{other_rank}" for other_rank in range(size)], HOST_TIMEOUT)
    return store


def choose_backends(device: torch.device) -> str:
    """Return the backends of a process group on ``device``: tensors in host memory are exchanged there too.

    Without a bound device: NCCL would connect at once, and fail with its own message if two ranks share a GPU.
    """
    device_backend = dist.get_default_backend_for_device(device)  # nccl, also for RCCL; xccl; gloo
    return device_backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{device_backend}"


def ensure_process_group(world: World) -> None:
    """Create a process group of one if there is none, for libraries that require one."""
    if not dist.is_initialized():
        dist.init_process_group(
            choose_backends(world.device), store=dist.HashStore(), rank=0, world_size=1, timeout=world.timeout
        )


def leave() -> None:
    """Leave the process group, if there is one; on success only, as it waits for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


_TYPE = "__type__"
_TENSOR_TYPES = {str(dtype): dtype for dtype in (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
)}  # fmt: skip


def dumps(value: Any, *types: type) -> bytes:
    """Return a value as bytes: None, numbers, text, lists, tuples, dictionaries, arrays, tensors, and ``types``.

    Args:
        types: dataclasses and named tuples that may be in it.

    Raises:
        TypeError: something else is in it.
    """
    return json.dumps(_convert_to_plain(value, types)).encode()


def loads(content: bytes, *types: type) -> Any:
    """Return the value of ``dumps`` with the same ``types``. Raises ValueError for anything else."""
    try:
        return _convert_from_plain(json.loads(content), {kind.__name__: kind for kind in types})
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # RecursionError is one
        raise ValueError(f"another rank sent what is no object: {type(error).__name__}: {error}") from error


def _convert_to_plain(value: Any, types: tuple[type, ...]) -> Any:
    def plain(item: Any) -> Any:
        return _convert_to_plain(item, types)

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if type(value) in types:
        names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
        return {_TYPE: type(value).__name__, "fields": {name: plain(getattr(value, name)) for name in names}}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {_TYPE: "tuple", "items": [plain(item) for item in value]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TYPE not in value:
            return {key: plain(item) for key, item in value.items()}
        return {_TYPE: "dict", "items": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor, kind = torch.from_numpy(value.copy()), "array"
    elif isinstance(value, torch.Tensor):
        tensor, kind = value.detach().cpu(), "tensor"
    else:
        raise TypeError(f"ranks exchange plain data, no {type(value).__name__}")
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)  # with a stride of 1
    content = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return {_TYPE: kind, "dtype": str(tensor.dtype), "shape": list(value.shape), "data": content}


def _convert_from_plain(plain: Any, types: dict[str, type]) -> Any:
    if isinstance(plain, list):
        return [_convert_from_plain(item, types) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(_TYPE)
    if kind is None:
        return {key: _convert_from_plain(item, types) for key, item in plain.items()}
    if kind == "tuple":
        return tuple(_convert_from_plain(item, types) for item in plain["items"])
    if kind == "dict":
        return {_convert_from_plain(key, types): _convert_from_plain(item, types) for key, item in plain["items"]}
    if kind in ("array", "tensor"):
        data = bytearray(base64.b64decode(plain["data"], validate=True))
        dtype = _TENSOR_TYPES[plain["dtype"]]
        tensor = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensor = tensor.reshape(plain["shape"])
        return tensor if kind == "tensor" else tensor.numpy()
    return types[kind](**{name: _convert_from_plain(item, types) for name, item in plain["fields"].items()})


# Name and position of the tensor in a call; ranks must agree on the tensor's shape, except where it is None.
_SAME_SHAPE = {
    "all_reduce": ("tensor", 0),
    "broadcast": ("tensor", 0),
    "reduce": ("tensor", 0),
    "all_gather_into_tensor": ("input_tensor", 1),
    "all_gather_single": ("input_tensor", 1),
    "reduce_scatter_single": ("input", 1),
    "reduce_scatter_tensor": ("input", 1),
}
_OTHERS = (
    *("all_gather", "all_gather_object", "all_to_all", "all_to_all_single", "barrier", "broadcast_object_list"),
    *("gather", "gather_object", "reduce_scatter", "scatter", "scatter_object_list"),
)
# What torch gives as a group to the ranks outside of it, whose calls return at once.
_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
_TORCH = os.path.dirname(torch.__file__)
_OURS = str(Path(__file__).parent / "world.py")


def report_collectives() -> None:
    """Replace the collectives of torch.distributed by functions that report and call them."""
    for name in (*_SAME_SHAPE, *_OTHERS):
        function = getattr(dist, name)
        if not hasattr(function, "reports_to_heartbeat"):
            setattr(dist, name, _report_collective(function, name))


def _report_collective(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    argument, position = _SAME_SHAPE.get(name, (None, 0))
    names = list(inspect.signature(function).parameters)
    group_position = names.index("group") if "group" in names else sys.maxsize  # a library's own takes anything

    @functools.wraps(function)
    def collective(*arguments: Any, **keywords: Any) -> Any:
        local_heartbeat = heartbeat.find_own_heartbeat()
        group = arguments[group_position] if len(arguments) > group_position else keywords.get("group")
        if local_heartbeat is None or group == _NO_MEMBER:
            return function(*arguments, **keywords)
        value = None if argument is None else keywords.get(argument, arguments[position : position + 1])
        value = value[0] if isinstance(value, tuple) and value else value
        tensor = _type_and_shape(value.dtype, value.shape) if isinstance(value, torch.Tensor) else ""
        counted = group is None or group.size() == dist.get_world_size()
        local_heartbeat.enter(name, tensor, _find_calling_line(), counted=counted, same_shape=argument is not None)
        try:
            return function(*arguments, **keywords)
        finally:
            local_heartbeat.leave()

    collective.reports_to_heartbeat = True  # type: ignore[attr-defined]
    return collective


@functools.lru_cache(4096)
def _type_and_shape(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _find_calling_line() -> str:
    """Return the file and line that call the collective, outside torch and our own wrappers of it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return _format_line(frame.f_code.co_filename, frame.f_lineno)


@functools.cache
def _is_skipped(file: str) -> bool:
    return file.startswith((_TORCH, _OURS))


@functools.cache
def _format_line(file: str, line: int) -> str:
    return f"{file}:{line}"


def explain_memory_shortage(world: World, required: int, available: int | None) -> str | None:
    """Return why ranks cannot allocate ``required`` bytes more each, the same on all; None if they can.

    Every rank must call this.

    Args:
        available: bytes that this rank may use; None: most of the free memory.
    """
    available_by_rank = [
        free for (free,) in world.gather_floats([USABLE * free_bytes(world) if available is None else available])
    ]
    least = min(available_by_rank)
    if required <= least:
        return None
    rank = available_by_rank.index(least)
    return f"the full weights need {_format_bytes(required)}, but rank {rank} has only {_format_bytes(least)} available"


def free_bytes(world: World) -> int:
    """Return the free bytes on this rank's device, or its share of a host's memory."""
    if world.device.type != "cpu":
        memory = torch.accelerator
        unused = memory.memory_reserved(world.device) - memory.memory_allocated(world.device)
        return memory.get_memory_info(world.device)[0] + unused
    return _share_of_host(world)


def can_allocate_on_host(world: World, required: int) -> bool:
    """Return whether each rank can allocate its ``required`` bytes in its host's memory, the same on all.

    Every rank must call this.
    """
    return all(short <= 0 for (short,) in world.gather_floats([required - USABLE * _share_of_host(world)]))


def _share_of_host(world: World) -> int:
    return detect().usable_bytes // world.local_size


def _format_bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
