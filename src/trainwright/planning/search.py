"""Judge every way of running a workload on a machine and take the fastest that fits. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

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
from trainwright.planning.errors import Errors, errors_of
from trainwright.planning.memory.peak import Memory, memory_of
from trainwright.planning.step_time.corrections import Corrections
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import StepTime, least_seconds, step_time
from trainwright.planning.workload import Choice, Workload
from trainwright.registries import STRATEGIES

# Of a host's free memory this part is left to other programs, which take more and less of it.
LEFT_ALONE = 0.15
# Layouts whose fastest step is within this of the fastest of all count as equally fast, and the simplest one wins.
_AS_FAST = 0.02
# The choice within that layout is the simplest whose step is within this of the fastest of all. On a CPU it is larger,
# as every further micro-batch takes more time there than is predicted.
AS_FAST = {"cpu": 0.05, "cuda": _AS_FAST}
# Keys of a recipe's section train that a strategy may take some values of alone.
_LIMITED = ("mixed_precision", "compile", "activation_checkpointing", "activation_offload")
# What is further from fitting than this with all recomputed does not fit with less of it.
_NEAR = 1.1
# Micro-batches that are timed for one layout: the largest ones that fit. Where small ones save padding, or stay in a
# processor's caches, all are.
_PER_ROW = 4


Verdict = Literal["fits", "close", "too large"]


@dataclass(frozen=True)
class Judged:
    """A choice with what it needs. ``available_bytes``: what a device has for it; on a CPU without ``LEFT_ALONE``.

    ``needed_bytes``: on one device; on a CPU of all processes together, which share its memory. ``errors``: that plans
    of its kind have had. ``bold``: what could be too large by these is taken to fit where it is not expected to be.
    ``time``: None where it does not fit, or where it does not run here (``missing`` says why).
    """

    choice: Choice
    memory: Memory
    needed_bytes: int
    available_bytes: int
    host_needed_bytes: int
    host_available_bytes: int
    errors: Errors
    bold: bool = False
    time: StepTime | None = None
    missing: str | None = None

    @property
    def layout(self) -> Layout:
        """Return the candidate's layout."""
        return layout_of(self.choice)

    @property
    def needed_interval(self) -> tuple[int, int]:
        """Bytes that such runs took, by what was predicted of them."""
        low, high = self.errors.memory.of(self.needed_bytes)
        return int(low), int(high)

    @property
    def verdict(self) -> Verdict:
        """Close: the limit is within the interval."""
        low, high = self.needed_interval
        if low > self.available_bytes or self.host_needed_bytes > self.host_available_bytes:
            return "too large"
        return "close" if high > self.available_bytes else "fits"

    @property
    def is_close(self) -> bool:
        """Whether it is so near to the limit that it should be tried before it is trusted."""
        return self.verdict == "close"

    @property
    def fits(self) -> bool:
        """Return whether the candidate fits."""
        return self.verdict == "fits" or (self.bold and self.is_close and self.needed_bytes <= self.available_bytes)

    @property
    def runs(self) -> bool:
        """Return whether the candidate fits and nothing is missing for it."""
        return self.fits and self.missing is None

    @property
    def shortfall(self) -> float:
        """What it may need over what there is, of whichever is scarcer."""
        host = self.host_needed_bytes / self.host_available_bytes if self.host_available_bytes else 0.0
        needed = self.needed_bytes if self.bold else self.needed_interval[1]
        return max(needed / max(1, self.available_bytes), host)


@dataclass(frozen=True)
class Found:
    """``best``: the choice to run, None where nothing fits. ``judged``: the best of every layout and world.

    ``fastest``: seconds of the fastest step of all that fits. ``best`` is within ``AS_FAST`` of it.
    ``slower``: numbers of processes that were not looked at, as a step would take longer than the best even at the
    devices' peak rate; with the seconds that it would take so.
    """

    best: Judged | None
    judged: tuple[Judged, ...]
    fastest: float = math.inf
    slower: Mapping[int, float] = field(default_factory=dict)

    @property
    def nearest(self) -> Judged:
        """The one that comes nearest to fitting."""
        return min(self.judged, key=lambda one: one.shortfall)


class Judge:
    """Judges choices for one workload on one machine.

    ``available``: asked for a strategy; gives None, or the reason why it does not run here. ``own``: errors of plans of
    runs on this machine, which tell more than those of other machines. ``bold``: as in ``Judged``.
    ``corrections``: of the times, by what this machine's own runs took.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        rates: Rates,
        available: Callable[[str], str | None] = lambda strategy: None,
        own: Errors | None = None,
        bold: bool = False,
        corrections: Corrections | None = None,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.rates = rates
        self.available = available
        self.own = own
        self.bold = bold
        self.corrections = corrections
        self._fitted: dict[Choice, Judged] = {}
        self._times: dict[Choice, StepTime] = {}

    def bolder(self) -> Judge:
        """One that also takes what is close where it is expected to fit, and knows all that is known here."""
        other = Judge(self.workload, self.cluster, self.rates, self.available, self.own, True, self.corrections)
        other._fitted = {choice: replace(judged, bold=True) for choice, judged in self._fitted.items()}
        other._times = self._times
        return other

    def fit(self, choice: Choice) -> Judged:
        """Return what a choice needs; not yet how long it takes."""
        if choice not in self._fitted:
            self._fitted[choice] = self._fit(choice)
        return self._fitted[choice]

    def _fit(self, choice: Choice) -> Judged:
        memory = memory_of(self.workload, choice, self.cluster)
        processes_here = min(choice.num_processes, self.cluster.devices_per_node)
        if self.cluster.device == "cpu":
            needed, host, left_alone = memory.total * -(-choice.num_processes // self.cluster.nodes), 0, LEFT_ALONE
        else:
            needed, host, left_alone = memory.total, sum(memory.host.values()) * processes_here, 0.0
        free = self.cluster.host_free_bytes or self.cluster.host_memory_bytes
        return Judged(
            choice=choice,
            memory=memory,
            needed_bytes=needed,
            available_bytes=int(self.cluster.usable_bytes * (1 - left_alone)),
            host_needed_bytes=host,
            host_available_bytes=int(free * (1 - LEFT_ALONE)),
            errors=self.own or errors_of(self.workload, choice, self.cluster),
            bold=self.bold,
            missing=self._unfit(choice) or self.available(choice.strategy),
        )

    def _unfit(self, choice: Choice) -> str | None:
        adapter = self.workload.adapter
        asked = {
            "model.adapter.type": "none" if adapter is None else adapter.kind,
            "model.adapter.quantisation": self.workload.quantisation,
            "optimizer.name": self.workload.optimizer,
            **{f"train.{key}": getattr(choice, key) for key in _LIMITED},
        }
        limit = choice.spec.refuses(asked)
        return None if limit is None else limit.short

    def timed(self, judged: Judged) -> Judged:
        """With how long it takes."""
        return replace(judged, time=self._time(judged.choice))

    def seconds(self, choice: Choice) -> float:
        """Of a step."""
        return self._time(choice).seconds

    def least_seconds(self, processes: int, wishes: Wishes) -> float:
        """Which no step takes less than on so many processes."""
        return least_seconds(self.workload, processes, precision_for(wishes, self.cluster), self.rates)

    def _time(self, choice: Choice) -> StepTime:
        if choice not in self._times:
            found = step_time(self.workload, choice, self.cluster, self.rates)
            factor = 1.0 if self.corrections is None else self.corrections.of(choice).seconds
            self._times[choice] = found if factor == 1.0 else found.times(factor)
        return self._times[choice]


@dataclass(frozen=True)
class _Tried:
    """A layout on a number of processes: the choices that fit, and the one that needs least where none does."""

    fitting: tuple[Choice, ...]
    least: Judged
    fastest: float = math.inf

    @property
    def runs(self) -> bool:
        return bool(self.fitting) and self.least.missing is None


def search(judge: Judge, wishes: Wishes, sure: bool = False) -> Found:
    """Return the fastest choice that fits among those that ``wishes`` leave; the simpler where two are as fast.

    Where none does, the fastest that is close, but if it is to be ``sure``. Keeping numbers in the host's memory costs
    time, so it is looked at where nothing fits, or is close, without.
    """
    for offloads in (False, True):
        found = _search(judge, wishes, offloads)
        if found.best is None and not sure and any(one.is_close for one in found.judged):
            found = _search(judge.bolder(), wishes, offloads)
        if found.best is not None:
            break
    return found


def _search(judge: Judge, wishes: Wishes, offloads: bool) -> Found:
    tried: list[_Tried] = []
    slower: dict[int, float] = {}
    fastest = math.inf
    for processes in worlds(judge.workload, judge.cluster, wishes):
        bound = judge.least_seconds(processes, wishes)
        if bound > fastest:
            slower[processes] = bound
            continue
        all_layouts = tuple(layouts(processes, judge.cluster, wishes))
        found = _try(judge, [layout for layout in all_layouts if not layout.offloads], processes, wishes)
        if offloads and not any(one.runs for one in found):
            found += _try(judge, [layout for layout in all_layouts if layout.offloads], processes, wishes)
        tried += found
        fastest = min([fastest, *(one.fastest for one in found if one.runs)])
    judged = [_best_of(judge, one, fastest) for one in tried]
    equal = [best for one, best in zip(tried, judged, strict=True) if one.runs and _is_as_fast(one, fastest)]
    best = min(equal, key=lambda one: _simplicity(one.choice), default=None)
    return Found(best, tuple(judged), fastest, slower)


def _is_as_fast(one: _Tried, fastest: float) -> bool:
    return one.fastest <= fastest * (1 + _AS_FAST)


def _best_of(judge: Judge, one: _Tried, fastest: float) -> Judged:
    """Return the simplest of a layout's fastest choices; where none fits, the one that needs least.

    ``fastest``: of all layouts. It decides for those that are as fast, so that the differences do not add up.
    """
    if not one.fitting:
        return one.least
    compared = fastest if one.runs and _is_as_fast(one, fastest) else one.fastest
    limit = compared * (1 + AS_FAST[judge.cluster.device])
    chosen = min((choice for choice in one.fitting if judge.seconds(choice) <= limit), key=_simplicity)
    return judge.timed(judge.fit(chosen))


def _try(judge: Judge, some: Iterable[Layout], processes: int, wishes: Wishes) -> list[_Tried]:
    found = (_try_layout(judge, layout, processes, wishes) for layout in some)
    return [one for one in found if one is not None]


def _try_layout(judge: Judge, layout: Layout, processes: int, wishes: Wishes) -> _Tried | None:
    """Return what fits of a layout and may be its fastest, with all threads or, where that was seen to be faster,
    fewer.
    """
    found = [_with_threads(judge, layout, processes, wishes, threads) for threads in judge.rates.threads(processes)]
    tried = [one for one in found if one is not None]
    return min(tried, key=lambda one: one.fastest, default=None)


def _with_threads(judge: Judge, layout: Layout, processes: int, wishes: Wishes, threads: int | None) -> _Tried | None:
    sizes = micro_batches(judge.workload, processes, wishes)
    if not sizes:
        return None
    options = recomputations(judge.workload, wishes)
    rows = {
        option: [choice_of(layout, processes, size, option, wishes, judge.cluster, threads) for size in sizes]
        for option in options
    }
    least = _least(judge, rows[options[-1]])
    if not least.fits and least.shortfall < _NEAR:
        least = min((_least(judge, rows[option]) for option in options), key=lambda one: one.shortfall)
    if not least.fits:
        return _Tried((), least)
    timed = _PER_ROW if judge.workload.packed and judge.cluster.device == "cuda" else len(sizes)
    whole = _fitting(judge, rows[options[0]])
    fitting = whole[:timed]
    done = {choice.micro_batch_size for choice in whole}  # with recomputation they take longer
    for option in options[1:]:
        fitting += _fitting(judge, [choice for choice in rows[option] if choice.micro_batch_size not in done])[:timed]
    return _Tried(tuple(fitting), least, min(map(judge.seconds, fitting)))


def _least(judge: Judge, choices: list[Choice]) -> Judged:
    """Return the one that needs least memory: the smallest micro-batch, or the one without accumulation."""
    return min((judge.fit(choices[0]), judge.fit(choices[-1])), key=lambda one: one.shortfall)


def _fitting(judge: Judge, choices: list[Choice]) -> list[Choice]:
    """Those of ``choices`` that fit; their micro-batches get smaller and smaller.

    With them the memory does, but for the first: without accumulation no gradients are kept between micro-batches.
    """
    once = [choice for choice in choices[:1] if choice.gradient_accumulation_steps == 1]
    low, high = len(once), len(choices)
    while low < high:
        middle = (low + high) // 2
        if judge.fit(choices[middle]).fits:
            high = middle
        else:
            low = middle + 1
    return [choice for choice in once if judge.fit(choice).fits] + choices[low:]


_RECOMPUTES = ("none", "selective", "full")


def _simplicity(choice: Choice) -> tuple[int, ...]:
    recompute = choice.activation_checkpointing
    return (
        int(layout_of(choice).offloads),
        STRATEGIES.order(choice.strategy),
        choice.num_processes,
        int(choice.replicate_size > 1),
        _RECOMPUTES.index(recompute) if recompute in _RECOMPUTES else 2,
        int(not choice.reshard_after_forward),
        choice.gradient_accumulation_steps,
    )
