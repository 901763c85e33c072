"""Collectives by kind, with their number and bytes, of a simulated process group or a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.planning.simulation.phases import STEP_PHASES, Phases

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


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


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


class RecordCollectives(TorchDispatchMode):
    """Record the collectives that this process calls within the context, of any process group."""

    def __init__(self, log: CollectiveLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective and call it."""
        if any(kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor takes itself apart first; it finds its layout with fake tensors
        if (collective := collective_of(func, args, kwargs or {})) is not None:
            self._log.note(collective)
        return func(*args, **(kwargs or {}))
