"""Bytes of live tensors of this process, to the byte, by phase of the run.

On a CPU torch's profiler reports every allocation and every release of the thread that trains; what is alive is their
running sum. On a GPU the caching allocator keeps the peak itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

_MARK, _SETTLED = "phase: ", "settled: "
_SECONDS_TO_LET_GO = 0.004


@dataclass
class LiveMemory:
    """``phases``: most bytes alive in each phase; filled when the measuring ends. ``reserved``: of a GPU's allocator.

    ``after_steps``: bytes alive after each optimizer step; equal ones show that no release was missed.
    """

    phases: dict[str, int] = field(default_factory=dict)
    after_steps: list[int] = field(default_factory=list)
    reserved: int = 0

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is inside belongs to this phase; the innermost counts."""
        if not torch.cuda.is_available():
            with record_function(_MARK + name):
                yield
            return
        self._note("other")
        yield
        self._note(name)

    def settle(self) -> None:
        """Between passes: count what is alive anew, in case a release was missed. What only C++ holds is not seen, so
        nothing that it keeps may be in flight."""
        if not torch.cuda.is_available():
            with record_function(f"{_SETTLED}{_alive()}"):
                pass

    def _note(self, name: str) -> None:
        """Count the peak since the last note to a phase (GPU)."""
        self.phases[name] = max(self.phases.get(name, 0), torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        if name == "step":
            self.after_steps.append(torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def live_memory() -> Iterator[LiveMemory]:
    """Measure from here to the end of the block; to be entered before any tensor is made."""
    live = LiveMemory()
    if torch.cuda.is_available():
        yield live
        live._note("other")
        return
    gc.collect()
    _release_here()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield live
    _read(live, recorded.profiler.kineto_results.events())


def _release_here() -> None:
    """Have what a collective worked on released by this thread: gloo's own lets go of it shortly after the waiting
    ends, and if it is the last to do so the profiler does not hear of it."""
    wait = dist.Work.wait

    def waited(work: dist.Work, *arguments: Any) -> Any:
        result = wait(work, *arguments)
        time.sleep(_SECONDS_TO_LET_GO)
        return result

    dist.Work.wait = waited  # type: ignore[method-assign]


def _alive() -> int:
    """Bytes of all storages that Python can see."""
    found = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    storages = {}
    for storage in (tensor.untyped_storage() for tensor in found):
        with suppress(RuntimeError):  # a DTensor has none of its own
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _read(live: LiveMemory, recorded: list[Any]) -> None:
    changes, marks = [], []
    for event in recorded:
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), 1, event.nbytes()))
        elif name.startswith(_MARK):
            marks += [(event.start_ns(), 0, name[len(_MARK) :]), (event.end_ns(), 2, name[len(_MARK) :])]
        elif name.startswith(_SETTLED):
            marks.append((event.end_ns(), 3, int(name[len(_SETTLED) :])))
    alive, inside = 0, ["other"]
    for _, kind, what in sorted(changes + marks, key=lambda item: item[:2]):
        if kind == 0:
            inside.append(what)
        elif kind == 2:
            inside.pop()
            if what == "step":
                live.after_steps.append(alive)
        elif kind == 3:
            alive = min(alive, what)
        else:
            alive += what
        name = inside[-1]
        live.phases[name] = max(live.phases.get(name, 0), alive)
