"""Judge every way of running a workload on a machine and take the fastest that fits. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainwright.machine.describe import Cluster
from trainwright.planning.candidates import (
    Layout,
    Wishes,
    choice_of,
    layout_of,
    layouts,
    micro_batches,
    precision_for,
    recomputations,
    worlds,
)
from trainwright.planning.memory import Memory, memory_of
from trainwright.planning.rates import Rates
from trainwright.planning.step_time import StepTime, least_seconds, step_time
from trainwright.planning.workload import Choice, Recompute, Workload

# Of what is free, this part is left alone: predictions are right to a few per cent, and the longest batch of a run
# may be one that nothing told of.
SAFETY_MARGIN = {"cuda": 0.06, "cpu": 0.15}
# What is nearer to the limit than this is tried before it is trusted.
_THIN = 0.10
# Step times nearer to each other than this are taken for equal, and the simpler one wins. Micro-batches of one layout
# are not told apart as exactly on a CPU, where every further one costs more than is counted.
_AS_FAST, _AS_FAST_IN_LAYOUT = 0.02, {"cpu": 0.05, "cuda": 0.02}
# What is further from fitting than this with all recomputed does not fit with less of it.
_NEAR = 1.1
# Micro-batches that are timed for one layout: the largest ones that fit. Where small ones save padding, or stay in a
# processor's caches, all are.
_PER_ROW = 4


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
    """``best``: the choice to run, None where nothing fits. ``judged``: the best of every layout and world.

    ``slower``: numbers of processes that were not looked at, as a step would take longer than the best even at the
    devices' peak rate; with the seconds that it would take so.
    """

    best: Judged | None
    judged: tuple[Judged, ...]
    slower: Mapping[int, float] = field(default_factory=dict)

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
        self._times: dict[Choice, StepTime] = {}

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
        if self.workload.optimizer == "muon" and choice.strategy.startswith("zero"):
            return "Muon works on whole matrices, and DeepSpeed cuts them up flat"
        return None

    def timed(self, judged: Judged) -> Judged:
        """With how long it takes."""
        return replace(judged, time=self._time(judged.choice))

    def seconds(self, choice: Choice) -> float:
        """Of a step."""
        return self._time(choice).seconds

    def least_seconds(self, processes: int, wishes: Wishes) -> float:
        """Which no step takes less than on so many processes."""
        return least_seconds(self.workload, processes, precision_for(wishes, self.cluster), self.cluster)

    def _time(self, choice: Choice) -> StepTime:
        if choice not in self._times:
            self._times[choice] = step_time(self.workload, choice, self.cluster, self.rates)
        return self._times[choice]


def search(judge: Judge, wishes: Wishes) -> Found:
    """The fastest choice that fits among those that ``wishes`` leave; the simpler where two are as fast."""
    judged: list[Judged] = []
    slower: dict[int, float] = {}
    fastest = math.inf
    for processes in worlds(judge.workload, judge.cluster, wishes):
        bound = judge.least_seconds(processes, wishes)
        if bound > fastest:
            slower[processes] = bound
            continue
        all_layouts = tuple(layouts(processes, judge.cluster, wishes))
        found = _bests(judge, [layout for layout in all_layouts if not layout.offloads], processes, wishes)
        # Keeping numbers in the host's memory costs time, so it is looked at where nothing fits without.
        if not any(one.runs for one in found):
            found += _bests(judge, [layout for layout in all_layouts if layout.offloads], processes, wishes)
        judged += found
        fastest = min([fastest, *(judge.seconds(one.choice) for one in found if one.runs)])
    running = {one.choice: one for one in judged if one.runs}
    return Found(running[_fastest(judge, running)] if running else None, tuple(judged), slower)


def _bests(judge: Judge, some: Iterable[Layout], processes: int, wishes: Wishes) -> list[Judged]:
    """Of each layout."""
    bests = (_best_of(judge, layout, processes, wishes) for layout in some)
    return [best for best in bests if best is not None]


def _best_of(judge: Judge, layout: Layout, processes: int, wishes: Wishes) -> Judged | None:
    """The fastest that fits of a layout; where none does, the one that needs least."""
    sizes = micro_batches(judge.workload, processes, wishes)
    if not sizes:
        return None

    def choices(recompute: Recompute, end: int) -> list[Choice]:
        return [choice_of(layout, processes, size, recompute, wishes, judge.cluster) for size in sizes[:end]]

    options = recomputations(judge.workload, wishes)
    least = judge.fit(choices(options[-1], len(sizes))[-1])
    if not least.fits and least.shortfall < _NEAR:
        least = min((judge.fit(choices(option, len(sizes))[-1]) for option in options), key=lambda one: one.shortfall)
    if not least.fits:
        return least
    fitting: list[Choice] = []
    end = len(sizes)
    timed = _PER_ROW if judge.workload.packed and judge.cluster.device == "cuda" else end
    for recompute in options:
        some = choices(recompute, end)
        if not some or not judge.fit(some[-1]).fits:
            continue
        first = _largest_that_fits(judge, some)
        fitting += some[first : first + timed]
        if recompute == options[0]:
            end = first  # what recomputes takes longer, but for a larger micro-batch than fits without
    return judge.timed(judge.fit(_fastest(judge, fitting, _AS_FAST_IN_LAYOUT[judge.cluster.device])))


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


def _fastest(judge: Judge, choices: Collection[Choice], as_fast: float = _AS_FAST) -> Choice:
    """The simplest of those within ``as_fast`` of the shortest step."""
    limit = min(map(judge.seconds, choices)) * (1 + as_fast)
    return min((choice for choice in choices if judge.seconds(choice) <= limit), key=_simplicity)


_STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")
_RECOMPUTES = ("none", "selective", "full")


def _simplicity(choice: Choice) -> tuple[int, ...]:
    recompute = choice.activation_checkpointing
    return (
        int(layout_of(choice).offloads),
        _STRATEGIES.index(choice.strategy),
        choice.num_processes,
        int(choice.replicate_size > 1),
        _RECOMPUTES.index(recompute) if recompute in _RECOMPUTES else 2,
        int(not choice.reshard_after_forward),
        choice.gradient_accumulation_steps,
    )
