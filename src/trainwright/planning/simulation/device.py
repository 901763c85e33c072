"""The card and the process group that are not there, and the worker that every run has, on them.

What would ask a driver or another rank is answered here; imports torch, so the shim must be loaded before it.

``torch.cuda`` of a simulated card; rank 0 of a world whose other ranks are taken to be like it; and files of tensors
without values, with their headers and sizes, and holes in place of the data.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch._dynamo  # asks for a CUDA build when it is imported, which this is not
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from trainwright.planning.simulation import mode
from trainwright.planning.simulation.recorders import Logs, WaitLog

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


@dataclass(frozen=True)
class SimulatedGpu:
    """The simulated GPU, as its driver would describe it, and how many of them a node has."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    count: int
    device_type: str = "cuda"


class SimulatedMemory(Protocol):
    """Bytes of tensors on the device."""

    @property
    def live(self) -> int:
        """Bytes of the tensors that there are now."""

    @property
    def peak(self) -> int:
        """The most that there have been at once."""

    def reset_peak(self) -> None:
        """Forget the peak."""


class _Event:
    _waits: WaitLog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.event_id = self.cuda_event = 0

    def record(self, *args: Any) -> _Event:
        return self

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._waits.note("waiting for an event")

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Stream:
    _waits: WaitLog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        self.device = torch.device(accelerator.type, 0)
        self.device_type, self.stream_id, self.device_index, self.cuda_stream = 1, 0, 0, 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        self._waits.note("waiting for a stream")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


@contextlib.contextmanager
def _enter_stream(stream: Any) -> Iterator[None]:
    yield


def install_card(card: SimulatedGpu, memory: SimulatedMemory, waits: WaitLog) -> None:
    """Replace what of ``torch.accelerator`` and of the device's own module, such as ``torch.cuda``, asks a driver."""
    _Event._waits = _Stream._waits = waits
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device(card.device_type)
    current, module = _Stream(), torch.get_device_module(card.device_type)
    for name, value in _build_answers(card, memory, waits, current).items():
        setattr(module, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *args: None)
    generic: Any = torch
    generic.Event, generic.Stream = _Event, _Stream
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    extension: Any = torch._C
    extension._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes looks for it when it is imported
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: card.count
    accelerator.current_device_index = lambda: 0
    accelerator.current_stream = lambda *args: current
    accelerator.synchronize = lambda *args: waits.note("waiting for the device")
    accelerator.set_device_index = lambda device: module.set_device(device)
    accelerator.empty_cache = lambda: None
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_stats"):
        setattr(accelerator, name, getattr(module, name))
    accelerator.get_memory_info = module.mem_get_info


def _build_properties(card: SimulatedGpu, device: Any = None) -> SimpleNamespace:
    index = device if isinstance(device, int) else torch.device(card.device_type if device is None else device).index
    return SimpleNamespace(
        name=card.name,
        total_memory=card.memory_bytes,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=132,
        warp_size=32,
        uuid=f"GPU-simulated-{torch.accelerator.current_device_index() if index is None else index}",
        gcnArchName="",
        is_integrated=False,
    )


def _build_answers(
    card: SimulatedGpu, memory: SimulatedMemory, waits: WaitLog, current: _Stream
) -> dict[str, Callable[..., Any] | type]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: card.count,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda *args: waits.note("waiting for the device"),
        "Stream": _Stream,
        "Event": _Event,
        "ExternalStream": _Stream,
        "current_stream": lambda *args: current,
        "default_stream": lambda *args: current,
        "stream": _enter_stream,
        "set_stream": lambda stream: None,
        "device": lambda device: _enter_stream(device),
        "empty_cache": lambda: None,
        "mem_get_info": lambda *args: (max(0, card.memory_bytes - memory.live), card.memory_bytes),
        "memory_allocated": lambda *args: memory.live,
        "memory_reserved": lambda *args: memory.live,
        "max_memory_allocated": lambda *args: memory.peak,
        "max_memory_reserved": lambda *args: memory.peak,
        "reset_peak_memory_stats": lambda *args: memory.reset_peak(),
        "memory_stats": lambda *args: {"allocated_bytes.all.current": memory.live, "num_alloc_retries": 0},
        "get_device_properties": functools.partial(_build_properties, card),
        "get_device_capability": lambda *args: card.capability,
        "get_device_name": lambda *args: card.name,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_bf16_supported": lambda *args, **kwargs: card.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda *args: True,
    }


@dataclass
class Rank:
    """The simulated rank: always rank 0 of ``world`` ranks, ``local`` of them on its node."""

    card: SimulatedGpu
    world: int = 1
    local: int = 1


def install_groups(rank: Rank) -> None:
    """Make every process group a fake one, this process rank 0 of ``rank.world``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    begin, subgroup = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        begin("fake", store=FakeStore(), rank=0, world_size=rank.world)

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return subgroup(ranks, backend="fake")

    replacements: dict[str, Any] = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "barrier": lambda *args, **kwargs: None,
    }
    for name, value in replacements.items():
        setattr(dist, name, value)
        if hasattr(dist.distributed_c10d, name):
            setattr(dist.distributed_c10d, name, value)
    for name in ("__init__", "__getitem__", "_create_sub_mesh", "_flatten"):
        setattr(DeviceMesh, name, _use_real_tensors(getattr(DeviceMesh, name)))
    DeviceMesh.from_group = staticmethod(_use_real_tensors(DeviceMesh.from_group))  # type: ignore[method-assign]
    mesh: Any = device_mesh
    mesh.init_device_mesh = dist.init_device_mesh = _use_real_tensors(mesh.init_device_mesh)


def _use_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with real tensors on the host: a mesh reads the values of its own."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


_MOST_HASHED = 2**30  # bytes; larger files are not read back by a run
_PART = bytes(2**20)


def install_files() -> None:
    """Have checkpoints and exports write such files, whose tensors all have the same checksum."""
    import safetensors.torch

    from trainwright.engine.checkpoints import checkpoint, writer
    from trainwright.models import files

    def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
        return _write(path, {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})

    def save_file(tensors: Mapping[str, torch.Tensor], file: Path, metadata: Any = None) -> None:
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError(f"safetensors writes contiguous tensors of the host, and {name} is not one")
        _write(Path(file), tensors)

    for module in (writer, checkpoint):
        module.write_tensors = write_tensors  # type: ignore[attr-defined]
    safetensors.torch.save_file = save_file  # type: ignore[assignment]
    # What is read from a hole is 0, and equals neither values that are known nor what stands for unknown ones.
    files.compute_checksum = lambda tensor: torch.zeros((), dtype=torch.int64)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    from trainwright.engine.checkpoints.writer import _NAMES

    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = (len(text) + -len(text) % 8).to_bytes(8, "little") + text + b" " * (-len(text) % 8)
    digest = hashlib.sha256(text)
    with path.open("wb") as file:
        file.write(text)
        file.truncate(len(text) + end)
    if end <= _MOST_HASHED:
        for begin in range(0, end, len(_PART)):
            digest.update(_PART[: end - begin])
    return len(text) + end, digest.hexdigest()


def install(rank: Rank) -> Logs:
    """Replace what of torch would ask a driver or another process; once, before models and strategies are imported.

    The size of the world may be set in ``rank`` later, before a process group exists.
    """
    logs = Logs()
    install_groups(rank)
    install_card(rank.card, logs.memory, logs.waits)
    mode.install(logs)
    torch.autograd.set_multithreading_enabled(False)
    # Libraries ask where data is to compare it; no data is read.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor is deprecated", UserWarning)
    install_files()
    mode.install_kernels(rank.card.capability)
    return logs


@contextmanager
def simulate_device(rank: Rank, logs: Logs) -> Iterator[None]:
    """Make all tensors within the context fake, and note what is done with them."""
    from trainwright.parallel.zero import deepspeed_engine
    from trainwright.tasks import reference

    fake, dispatch_mode = FakeTensorMode(allow_non_fake_inputs=True), mode.Simulated(logs, rank.card.capability)

    @contextmanager
    def only_these() -> Iterator[None]:
        with _disable_current_modes(), fake, dispatch_mode:
            yield

    # ZeRO-3 hides what it gathers from other modes, and would from these.
    hides: Any = deepspeed_engine
    hides._disable_current_modes = only_these
    # What other ranks compute is not known, and its values do not matter.
    reference.combine_sums = lambda world, own: np.nan_to_num(own)
    with fake, dispatch_mode:
        yield


def prepare(recipe: RecipeSchema, cache: Path) -> None:
    """Prepare the data and check the model, as before every run."""
    from trainwright.engine.task import import_task_module

    import_task_module(recipe).prepare_once(recipe, cache)


def train(directory: Path, cache: Path, rank: Rank, logs: Logs) -> None:
    """Train the run in ``directory`` as rank 0, to its export.

    Raises:
        TrainwrightError: as for a run.
        RuntimeError: an operation mixes devices or dtypes, or a kernel refuses its arguments.
    """
    from trainwright.parallel.world import RankInfo
    from trainwright.run.run_worker import Worker, run_worker

    rank_info = RankInfo(rank=0, size=rank.world, local_rank=0, local_size=rank.local, gpu=0, alone=True)
    run_worker(Worker(directory, rank_info=rank_info, cache=cache), watch=logs.phases.watch)
