"""Records of a simulated run, by step and phase: live bytes on the device, collectives, and waits of the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.planning.simulation.phases import STEP_PHASES, Phases, WaitLog
from trainwright.planning.trace.storages import Storages
from trainwright.planning.trace.values import tensors_in

_BLOCK = 512  # bytes; sizes of CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


class MemoryLog:
    """Bytes on the simulated device, as ``torch.cuda.memory_allocated`` counts them, and their peak in each phase."""

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.peaks: dict[str, int] = {}
        self.phase = "load"
        self._storages = Storages(lambda _, size: self._add(-size), block=_BLOCK)

    def note(self, tensor: torch.Tensor) -> None:
        """Follow the storage of a tensor on the device."""
        self._add(self._storages.follow(tensor.untyped_storage()))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a followed storage, as FSDP2 frees gathered parameters by resizing them to nothing."""
        if storage in self._storages:
            self._add(self._storages.follow(storage))

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self._add(0)

    def reset_peak(self) -> None:
        """Forget the peak of all phases together."""
        self.peak = self.live

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)


# Names of torch's c10d operations: the kind as in torch.distributed, and which argument has the full size.
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", 0),
    "alltoall_base_": ("all_to_all", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
# Those of DTensors, which take the number of ranks as an argument.
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class RecordedCollective:
    """A collective of a rank. ``bytes``: of the full tensor, which every rank gets or gives together."""

    kind: str
    bytes: int
    ranks: int


def collective_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCollective | None:
    """Return the collective that an operation is; None for any other operation, and for barriers."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace == "_c10d_functional" and name in _FUNCTIONAL:
        ranks = next((value for value in args[1:] if isinstance(value, int)), 1)
        size = args[0].nbytes * (ranks if name == "all_gather_into_tensor" else 1)
        return RecordedCollective(_FUNCTIONAL[name], size, ranks)
    if namespace != "c10d" or name not in _KINDS:
        return None
    kind, full = _KINDS[name]
    group = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.ScriptObject)), None)
    return RecordedCollective(kind, sum(tensor.nbytes for tensor in tensors_in(args[full])), _size(group))


def _size(group: Any) -> int:
    from torch.distributed import ProcessGroup

    return 0 if group is None else ProcessGroup.unbox(group).size()


class CollectiveLog:
    """Collectives by step and phase; step 0 is what comes before the first one."""

    def __init__(self, phases: Phases) -> None:
        self.counts: Counter[tuple[int, str, RecordedCollective]] = Counter()
        self._phases = phases

    def note(self, collective: RecordedCollective) -> None:
        """Add a collective."""
        self.counts[self._phases.step, self._phases.phase, collective] += 1

    def of_step(self, step: int) -> dict[str, tuple[int, int]]:
        """Return number and bytes by kind, of the passes and the update of a step."""
        sums: dict[str, list[int]] = {}
        for (when, phase, one), count in self.counts.items():
            if step == when and phase in STEP_PHASES:
                total = sums.setdefault(one.kind, [0, 0])
                total[0] += count
                total[1] += count * one.bytes
        return {kind: (count, size) for kind, (count, size) in sorted(sums.items())}


class Logs:
    """What a simulated rank has done, by step and phase."""

    def __init__(self) -> None:
        self.memory = MemoryLog()
        self.phases = Phases(self.memory.enter)
        self.collectives = CollectiveLog(self.phases)
        self.waits = WaitLog(self.phases)
