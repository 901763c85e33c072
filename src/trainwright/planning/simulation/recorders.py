"""Records of a simulated run, by step and phase: live bytes on the device, collectives, and waits of the host.

Step and phase follow from the calls that the strategy of the run receives; with them goes the line of its source.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainwright.planning.trace.record import Storages
from trainwright.planning.trace.values import list_tensors

if TYPE_CHECKING:
    from trainwright.engine.task import Task
    from trainwright.parallel.strategy import Strategy


# Of a step; a run is also in "load", "evaluation", "checkpoint" and "export".
STEP_PHASES = ("forward", "backward", "optimizer")


class Phases:
    """Where a run is. ``step``: the step that runs, 0 before the first one; ``finished``: the steps that are done."""

    def __init__(self, entered: Callable[[str], None] = lambda phase: None) -> None:
        self.step = 0
        self.phase = "load"
        self.finished = 0
        self._entered = entered
        self._inside = False

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self._entered(phase)

    def watch(self, task: Task, strategy: Strategy) -> None:
        """Follow a run from now on; it repeats the largest step, and an evaluation is cut to one batch."""
        stream = task.stream
        total_examples, stream.total_examples = stream.total_examples, None
        largest = stream.global_batch(stream.find_largest_step())
        stream.total_examples = total_examples
        stream.global_batch = lambda step: largest  # type: ignore[method-assign]
        if task.validation is not None and task.validation.total_examples is not None:
            batch = task.validation.global_batch_size
            task.validation.total_examples = min(task.validation.total_examples, batch)
        strategy.module.register_forward_pre_hook(self._passes, prepend=True)
        self._mark(strategy, "backward", "backward")
        self._mark(strategy, "gradient_norm", "optimizer")
        self._mark(strategy, "step", "optimizer")
        self._mark(strategy, "state", "checkpoint")
        self._mark(strategy, "parameters", "export")

    def _passes(self, module: Any, inputs: Any) -> None:
        if module.training:
            self.step = self.finished + 1
        self.enter("forward" if module.training else "evaluation")

    def _mark(self, strategy: Strategy, name: str, phase: str) -> None:
        """Begin ``phase`` when the method is called, except by another method of the strategy."""
        method = getattr(strategy, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self.enter(phase)
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False
                self.finished += name == "step"

        setattr(strategy, name, call)


_PACKAGE = str(Path(__file__).parents[2])
_SIMULATION = str(Path(__file__).parent)
_INSTALLED = ("site-packages/", "dist-packages/")
_STANDARD = sysconfig.get_path("stdlib")


def find_source_location() -> str:
    """Return the innermost line of this package that is running, and that of other code below it.

    ``models/causal_lm.py:148 _compute_hidden (transformers/masking_utils.py:93 create_mask)``
    """
    return _describe_location(traceback.walk_stack(sys._getframe(1)))


def find_error_location(error: BaseException) -> str:
    """Return the line that raised an exception, as ``find_source_location``."""
    return _describe_location(reversed([*traceback.walk_tb(error.__traceback__)]))


def _describe_location(frames: Iterator[tuple[FrameType, int]]) -> str:
    """Return the location of the innermost of ``frames``, each with its line, innermost first."""
    foreign_location = ""
    for frame, line in frames:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_PACKAGE):
            if not file.startswith(_SIMULATION):
                location = f"{file[len(_PACKAGE) + 1 :]}:{line} {function}"
                return f"{location} ({foreign_location})" if foreign_location else location
        elif not foreign_location and (name := _look_up_name(file)):
            foreign_location = f"{name}:{line} {function}"
    return foreign_location or "outside the package"


def _look_up_name(file: str) -> str:
    """Return a short name of a file of other code; empty for torch's, Python's own, and generated code."""
    package_path = next((file.partition(part)[2] for part in _INSTALLED if part in file), None)
    if package_path is not None:
        return "" if package_path.startswith("torch/") else package_path
    return "" if file.startswith(("<", _STANDARD)) else Path(file).name


class Wait(NamedTuple):
    """A wait of the host. ``source_line``: the line that waits."""

    step: int
    phase: str
    cause: str
    source_line: str


class WaitLog:
    """Waits by step and phase; step 0 is what comes before the first one."""

    def __init__(self, phases: Phases) -> None:
        self.counts: Counter[Wait] = Counter()
        self._phases = phases

    def note(self, cause: str) -> None:
        """Add a wait at the line that is running."""
        self.counts[Wait(self._phases.step, self._phases.phase, cause, find_source_location())] += 1

    def count_step(self, step: int) -> dict[tuple[str, str], int]:
        """Return the number of waits of a step by cause and source line, most frequent first."""
        counts: Counter[tuple[str, str]] = Counter()
        for wait, count in self.counts.items():
            if wait.step == step and wait.phase in STEP_PHASES:
                counts[wait.cause, wait.source_line] += count
        return dict(counts.most_common())


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

    def update_size(self, storage: torch.UntypedStorage) -> None:
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


def find_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCollective | None:
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
    return RecordedCollective(kind, sum(tensor.nbytes for tensor in list_tensors(args[full])), _count_ranks(group))


def _count_ranks(group: Any) -> int:
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

    def count_step(self, step: int) -> dict[str, tuple[int, int]]:
        """Return number and bytes by kind, of the passes and the update of a step."""
        sums: dict[str, list[int]] = {}
        for (when, phase, collective), count in self.counts.items():
            if step == when and phase in STEP_PHASES:
                total = sums.setdefault(collective.kind, [0, 0])
                total[0] += count
                total[1] += count * collective.bytes
        return {kind: (count, size) for kind, (count, size) in sorted(sums.items())}


class Logs:
    """What a simulated rank has done, by step and phase."""

    def __init__(self) -> None:
        self.memory = MemoryLog()
        self.phases = Phases(self.memory.enter)
        self.collectives = CollectiveLog(self.phases)
        self.waits = WaitLog(self.phases)
