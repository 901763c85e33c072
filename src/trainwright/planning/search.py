"""Judge every way of running a workload on a machine and take the fastest that fits. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from trainwright.machine.describe import Cluster
from trainwright.planning.candidates import (
    Layout,
    Wishes,
    choice_of,
    layout_of,
    layouts,
    micro_batches,
    recomputations,
    worlds,
)
from trainwright.planning.memory import Memory, memory_of
from trainwright.planning.rates import Rates
from trainwright.planning.step_time import StepTime, step_time
from trainwright.planning.workload import Choice, Workload

# Of what is free, this part is left alone: predictions are right to a few per cent, and the longest batch of a run
# may be one that nothing told of.
SAFETY_MARGIN = {"cuda": 0.06, "cpu": 0.15}
# What is nearer to the limit than this is tried before it is trusted.
_THIN = 0.10
# Step times nearer to each other than this are taken for equal, and the simpler one wins.
_AS_FAST = 0.02
_PER_ROW = 4  # micro-batches that are timed for one layout: the largest ones that fit


@dataclass(frozen=True)
class Judged:
    """A choice with what it needs. ``available_bytes``: what a device has for it, the margin taken off.

    ``needed_bytes``: on one device; on a CPU of all processes together, which share its memory. ``time``: None where
    it does not fit, or where it does not run here (``missing`` says why).
    """

    choice: Choice
    memory: Memory
    needed_bytes: int
    available_bytes: int
    host_needed_bytes: int
    host_available_bytes: int
    time: StepTime | None = None
    missing: str | None = None

    @property
    def layout(self) -> Layout:
        return layout_of(self.choice)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes and self.host_needed_bytes <= self.host_available_bytes

    @property
    def runs(self) -> bool:
        return self.fits and self.missing is None

    @property
    def is_thin(self) -> bool:
        return self.needed_bytes > (1 - _THIN) * self.available_bytes

    @property
    def shortfall(self) -> float:
        """What it needs over what there is, of whichever is scarcer."""
        host = self.host_needed_bytes / self.host_available_bytes if self.host_available_bytes else 0.0
        return max(self.needed_bytes / max(1, self.available_bytes), host)


@dataclass(frozen=True)
class Found:
    """``best``: the choice to run, None where nothing fits. ``judged``: the best of every layout and world."""

    best: Judged | None
    judged: tuple[Judged, ...]

    @property
    def nearest(self) -> Judged:
        """The one that comes nearest to fitting."""
        return min(self.judged, key=lambda one: one.shortfall)


class Judge:
    """Judges choices for one workload on one machine.

    ``available``: asked for a strategy; gives None, or the reason why it does not run here.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        rates: Rates,
        available: Callable[[str], str | None] = lambda strategy: None,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.rates = rates
        self.available = available
        self._fitted: dict[Choice, Judged] = {}

    def fit(self, choice: Choice) -> Judged:
        """What a choice needs; not yet how long it takes."""
        if choice not in self._fitted:
            self._fitted[choice] = self._fit(choice)
        return self._fitted[choice]

    def _fit(self, choice: Choice) -> Judged:
        memory = memory_of(self.workload, choice, self.cluster)
        margin = 1 - SAFETY_MARGIN[self.cluster.device]
        processes_here = min(choice.num_processes, self.cluster.devices_per_node)
        if self.cluster.device == "cpu":
            needed, host = memory.total * -(-choice.num_processes // self.cluster.nodes), 0
        else:
            needed, host = memory.total, sum(memory.host.values()) * processes_here
        free = self.cluster.host_free_bytes or self.cluster.host_memory_bytes
        return Judged(
            choice=choice,
            memory=memory,
            needed_bytes=needed,
            available_bytes=int(self.cluster.usable_bytes * margin),
            host_needed_bytes=host,
            host_available_bytes=int(free * (1 - SAFETY_MARGIN["cpu"])),
            missing=self._unfit(choice) or self.available(choice.strategy),
        )

    def _unfit(self, choice: Choice) -> str | None:
        if self.workload.quantisation != "none" and choice.strategy.startswith("zero"):
            return "DeepSpeed does not take quantised weights"
        return None

    def timed(self, judged: Judged) -> Judged:
        return replace(judged, time=step_time(self.workload, judged.choice, self.cluster, self.rates))

    def seconds(self, judged: Judged) -> float:
        assert judged.time is not None
        return judged.time.seconds


def search(judge: Judge, wishes: Wishes) -> Found:
    """The fastest choice that fits among those that ``wishes`` leave; the simpler where two are as fast."""
    judged: list[Judged] = []
    for processes in worlds(judge.workload, judge.cluster, wishes):
        found = [
            one
            for layout in layouts(processes, judge.cluster, wishes)
            if not layout.offloads
            for one in _best_of(judge, layout, processes, wishes)
        ]
        # Keeping numbers in the host's memory costs time, so it is looked at where nothing fits without.
        if not any(one.runs for one in found):
            found += [
                one
                for layout in layouts(processes, judge.cluster, wishes)
                if layout.offloads
                for one in _best_of(judge, layout, processes, wishes)
            ]
        judged += found
    return Found(_fastest(judge, [one for one in judged if one.runs]), tuple(judged))


def _best_of(judge: Judge, layout: Layout, processes: int, wishes: Wishes) -> Iterable[Judged]:
    """The fastest that fits of a layout; where none does, the one that needs least."""
    sizes = micro_batches(judge.workload, processes, wishes)
    if not sizes:
        return []
    fitting: list[Judged] = []
    least: Judged | None = None
    for recompute in recomputations(judge.workload, wishes):
        choices = [choice_of(layout, processes, size, recompute, wishes, judge.cluster) for size in sizes]
        smallest = judge.fit(choices[-1])
        if not smallest.fits:
            least = smallest if least is None or smallest.shortfall < least.shortfall else least
            continue
        first = _largest_that_fits(judge, choices)
        fitting += [judge.timed(judge.fit(choice)) for choice in choices[first : first + _PER_ROW]]
    if fitting:
        best = _fastest(judge, fitting)
        assert best is not None
        return [best]
    return [] if least is None else [least]


def _largest_that_fits(judge: Judge, choices: list[Choice]) -> int:
    """The first index that fits; they need less and less memory, and the last one is known to fit."""
    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        if judge.fit(choices[middle]).fits:
            high = middle
        else:
            low = middle + 1
    return low


def _fastest(judge: Judge, candidates: list[Judged]) -> Judged | None:
    """The first within two per cent of the shortest step: candidates come with the simpler ones in front."""
    if not candidates:
        return None
    limit = min(judge.seconds(one) for one in candidates) * (1 + _AS_FAST)
    return min((one for one in candidates if judge.seconds(one) <= limit), key=_simplicity)


_STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")
_RECOMPUTES = ("none", "selective", "full")


def _simplicity(judged: Judged) -> tuple[int, ...]:
    choice, layout = judged.choice, judged.layout
    recompute = choice.activation_checkpointing
    return (
        int(layout.offloads),
        _STRATEGIES.index(choice.strategy),
        choice.num_processes,
        int(choice.replicate_size > 1),
        _RECOMPUTES.index(recompute) if recompute in _RECOMPUTES else 2,
        int(not choice.reshard_after_forward),
        choice.gradient_accumulation_steps,
    )
