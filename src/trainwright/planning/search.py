"""Evaluate all candidates for a workload on a machine and choose the fastest that fits. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainwright.machine.describe import Cluster
from trainwright.machine.vendors import look_up_processor
from trainwright.planning.candidates import (
    Constraints,
    ParallelLayout,
    build_choice,
    build_layout,
    choose_precision,
    iterate_layouts,
    list_micro_batches,
    list_recomputations,
    list_worlds,
)
from trainwright.planning.errors import Errors, build_errors
from trainwright.planning.memory.peak import COPY, LOADING, Memory, estimate_least_memory, estimate_memory
from trainwright.planning.step_time.basis import Corrections
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import StepTime, compute_least_seconds, estimate_step_time
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.registries import STRATEGIES

# Share of the host's free memory that is left to other programs, whose use varies.
LEFT_ALONE = 0.15
# Layouts whose fastest step is within this share of the fastest of all count as equal; the simplest one is chosen.
_AS_FAST = 0.02
# Within that layout, the simplest candidate is chosen whose step is within this share of the fastest of all. It is
# larger on a CPU, where every further micro-batch takes more time than predicted.
AS_FAST = {"cpu": 0.05, "gpu": _AS_FAST}
# Keys of the recipe's section ``train`` whose values a strategy may restrict.
_LIMITED = ("mixed_precision", "compile", "activation_checkpointing", "activation_offload")
# If memory exceeds the limit by more than this factor with full recomputation, less recomputation is not tried.
_NEAR = 1.1
# Share of a step that recomputation takes at least, unless others, such as exchanges, take most of it.
_RECOMPUTING = 0.02
# Number of micro-batch sizes, the largest that fit, that are timed per layout. All are timed where small ones reduce
# padding or stay in a processor's caches.
_PER_ROW = 4


Verdict = Literal["fits", "close", "too large"]


@dataclass(frozen=True)
class Candidate:
    """A choice with its predicted memory and time.

    ``available_bytes``: available memory of a device; on a CPU without ``LEFT_ALONE``. ``needed_bytes``: memory on one
    device; on a CPU that of all processes together. ``errors``: errors of earlier predictions for this kind of run.
    ``bold``: whether a choice that is close counts as fitting. ``time``: None if it does not fit or cannot run here
    (``missing`` gives the reason).
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
    def layout(self) -> ParallelLayout:
        """The candidate's layout."""
        return build_layout(self.choice)

    @property
    def needed_interval(self) -> tuple[int, int]:
        """Bytes that runs with this prediction used, lowest and highest."""
        low, high = self.errors.memory.of(self.needed_bytes)
        return int(low), int(high)

    @property
    def verdict(self) -> Verdict:
        """Whether it fits; "close" if the limit lies within the interval."""
        low, high = self.needed_interval
        if low > self.available_bytes or self.host_needed_bytes > self.host_available_bytes:
            return "too large"
        return "close" if high > self.available_bytes else "fits"

    @property
    def is_close(self) -> bool:
        """Whether it is close to the memory limit and should be tried first."""
        return self.verdict == "close"

    @property
    def fits(self) -> bool:
        """Whether the candidate fits."""
        return self.verdict == "fits" or (self.bold and self.is_close and self.needed_bytes <= self.available_bytes)

    @property
    def runs(self) -> bool:
        """Whether the candidate fits and nothing that it requires is missing."""
        return self.fits and self.missing is None

    @property
    def shortfall(self) -> float:
        """Needed memory divided by available memory, of the device or the host, whichever is larger."""
        host = self.host_needed_bytes / self.host_available_bytes if self.host_available_bytes else 0.0
        needed_bytes = self.needed_bytes if self.bold else self.needed_interval[1]
        return max(needed_bytes / max(1, self.available_bytes), host)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    ``best``: the choice to run; None if nothing fits. ``candidates``: the best one of every layout and number of
    processes. ``fastest``: seconds of the fastest step that fits; ``best`` is within ``AS_FAST`` of it. ``slower``:
    numbers of processes that were skipped because even at the devices' peak rate a step would take longer than the
    best; with that time in seconds.
    """

    best: Candidate | None
    candidates: tuple[Candidate, ...]
    fastest: float = math.inf
    slower: Mapping[int, float] = field(default_factory=dict)

    @property
    def nearest(self) -> Candidate:
        """The candidate nearest to fitting."""
        return min(self.candidates, key=lambda one: one.shortfall)


@dataclass
class Evaluator:
    """Evaluate choices for one workload on one machine.

    ``available``: maps a strategy to None, or to the reason why it cannot run here. ``own``: prediction errors of runs
    on this machine, which are more precise than those of other machines. ``bold``: as in ``Candidate``.
    ``corrections``: factors on the times from this machine's own runs.
    """

    workload: Workload
    cluster: Cluster
    rates: Rates
    available: Callable[[str], str | None] = lambda strategy: None
    own: Errors | None = None
    bold: bool = False
    corrections: Corrections | None = None
    _fitted: dict[Choice, Candidate] = field(default_factory=dict, repr=False)
    _times: dict[Choice, StepTime] = field(default_factory=dict, repr=False)

    def reduce_margin(self) -> Evaluator:
        """Return an evaluator that also accepts close candidates that are expected to fit; it shares cached results."""
        fitted_candidates = {choice: replace(candidate, bold=True) for choice, candidate in self._fitted.items()}
        return replace(self, bold=True, _fitted=fitted_candidates)

    def fit(self, choice: Choice) -> Candidate:
        """Return the memory that a choice needs, without its time."""
        if choice not in self._fitted:
            self._fitted[choice] = self._fit(choice)
        return self._fitted[choice]

    def _fit(self, choice: Choice) -> Candidate:
        memory = estimate_memory(self.workload, choice, self.cluster)
        processes_here = min(choice.num_processes, self.cluster.devices_per_node)
        if self.cluster.device == "cpu":
            per_process = memory.total + memory.host.get(COPY, 0)
            needed_bytes, host, left_alone = per_process * -(-choice.num_processes // self.cluster.nodes), 0, LEFT_ALONE
        elif self.cluster.unified:
            host_bytes, loading = sum(memory.host.values()), memory.host.get(LOADING, 0)
            per_process = max(memory.total + host_bytes - loading, memory.phases["load"] + host_bytes)
            needed_bytes, host, left_alone = per_process * processes_here, 0, LEFT_ALONE
        else:
            needed_bytes, host, left_alone = memory.total, sum(memory.host.values()) * processes_here, 0.0
        free = self.cluster.host_free_bytes or self.cluster.host_memory_bytes
        return Candidate(
            choice=choice,
            memory=memory,
            needed_bytes=needed_bytes,
            available_bytes=int(self.cluster.usable_bytes * (1 - left_alone)),
            host_needed_bytes=host,
            host_available_bytes=int(free * (1 - LEFT_ALONE)),
            errors=self.own or build_errors(self.workload, choice, self.cluster),
            bold=self.bold,
            missing=self._explain_unfit(choice) or self.available(choice.strategy),
        )

    def never_fits(self, choice: Choice) -> bool:
        """Return whether what lasts from step to step is too much already, with whatever passes.

        False: it may fit, or only almost.
        """
        least, cluster = estimate_least_memory(self.workload, choice, self.cluster), self.cluster
        if cluster.device == "cpu":
            least *= -(-choice.num_processes // cluster.nodes)
        elif cluster.unified:
            least *= min(choice.num_processes, cluster.devices_per_node)
        left_alone = LEFT_ALONE if cluster.device == "cpu" or cluster.unified else 0.0
        errors = self.own or build_errors(self.workload, choice, cluster)
        return errors.memory.of(least)[0] > int(cluster.usable_bytes * (1 - left_alone))

    def _explain_unfit(self, choice: Choice) -> str | None:
        section = self.workload.model.adapter_section
        settings = {
            "model.adapter.type": section.get("type", "none"),
            "model.adapter.quantization": self.workload.model.quantization,
            "optimizer.name": self.workload.optimizer,
            "optimizer.master_weights": self.workload.master_weights,
            **{f"train.{key}": getattr(choice, key) for key in _LIMITED},
        }
        limit = choice.spec.refuses(settings)
        return None if limit is None else limit.short

    def time_candidate(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its step time."""
        return replace(candidate, time=self._time(candidate.choice))

    def seconds(self, choice: Choice) -> float:
        """Return the seconds of a step."""
        return self._time(choice).seconds

    def estimate_least_seconds(self, processes: int, constraints: Constraints) -> float:
        """Return a lower bound of the seconds of a step on this number of processes."""
        return compute_least_seconds(self.workload, processes, choose_precision(constraints, self.cluster), self.rates)

    def _time(self, choice: Choice) -> StepTime:
        if choice not in self._times:
            seconds = estimate_step_time(self.workload, choice, self.cluster, self.rates)
            factor = 1.0 if self.corrections is None else self.corrections.of(choice).seconds
            self._times[choice] = seconds if factor == 1.0 else seconds.times(factor)
        return self._times[choice]


@dataclass(frozen=True)
class _Tried:
    """A layout on a number of processes: the choices that fit, and the one that needs least memory."""

    fitting: tuple[Choice, ...]
    least: Candidate
    fastest: float = math.inf

    @property
    def runs(self) -> bool:
        return bool(self.fitting) and self.least.missing is None


def search(evaluator: Evaluator, constraints: Constraints, sure: bool = False) -> SearchResult:
    """Return the fastest choice that fits and satisfies ``constraints``; of equally fast ones the simplest.

    If none fits, return the fastest that is close, unless ``sure``, for which layouts that can never fit are left out.
    Offloading costs time, so it is considered only if nothing fits, or is close, without it.
    """
    for offloads in (False, True):
        result = _search(evaluator, constraints, offloads, sure)
        if result.best is None and not sure and any(candidate.is_close for candidate in result.candidates):
            result = _search(evaluator.reduce_margin(), constraints, offloads)
        if result.best is not None:
            break
    return result


def _search(evaluator: Evaluator, constraints: Constraints, offloads: bool, sure: bool = False) -> SearchResult:
    tried_layouts: list[_Tried] = []
    slower: dict[int, float] = {}
    fastest = math.inf
    for processes in list_worlds(evaluator.workload, evaluator.cluster, constraints):
        bound = evaluator.estimate_least_seconds(processes, constraints)
        if bound > fastest:
            slower[processes] = bound
            continue
        # What the recipe or the nodes require may leave processes idle.
        required_processes = constraints.fixed.get("num_processes", min(constraints.worlds, default=None))
        rows = math.inf if processes == required_processes else math.ceil(evaluator.workload.global_batch_rows)
        all_layouts = tuple(iterate_layouts(processes, evaluator.cluster, constraints, rows))
        if sure:
            all_layouts = tuple(layout for layout in all_layouts if _may_fit(evaluator, layout, processes, constraints))
        results = _try(evaluator, [layout for layout in all_layouts if not layout.offloads], processes, constraints)
        if offloads and not any(layout.runs for layout in results):
            results += _try(evaluator, [layout for layout in all_layouts if layout.offloads], processes, constraints)
        tried_layouts += results
        fastest = min([fastest, *(layout.fastest for layout in results if layout.runs)])
    candidates = [_choose_best(evaluator, layout, fastest) for layout in tried_layouts]
    equal = [
        best
        for layout, best in zip(tried_layouts, candidates, strict=True)
        if layout.runs and _is_as_fast(layout, fastest)
    ]
    best = min(equal, key=lambda one: _compute_simplicity(one.choice), default=None)
    return SearchResult(best, tuple(candidates), fastest, slower)


def _may_fit(evaluator: Evaluator, layout: ParallelLayout, processes: int, constraints: Constraints) -> bool:
    """Return whether any micro-batch of a layout may fit."""
    sizes = list_micro_batches(evaluator.workload, processes, constraints)
    ends = {*sizes[:1], *sizes[-1:]}  # without accumulation, and with it
    arguments = list_recomputations(evaluator.workload, constraints)[-1], constraints, evaluator.cluster
    return not all(evaluator.never_fits(build_choice(layout, processes, size, *arguments)) for size in ends)


def _is_as_fast(one: _Tried, fastest: float) -> bool:
    return one.fastest <= fastest * (1 + _AS_FAST)


def _choose_best(evaluator: Evaluator, one: _Tried, fastest: float) -> Candidate:
    """Return the simplest of a layout's fastest choices; if none fits, the one that needs least memory.

    ``fastest``: seconds of the fastest step of all layouts. Layouts that count as equally fast are compared with it, so
    that tolerances do not add up.
    """
    if not one.fitting:
        return one.least
    baseline = fastest if one.runs and _is_as_fast(one, fastest) else one.fastest
    limit = baseline * (1 + AS_FAST[look_up_processor(evaluator.cluster.device)])
    fast_choices = (choice for choice in one.fitting if evaluator.seconds(choice) <= limit)
    simplest_choice = min(fast_choices, key=_compute_simplicity)
    return evaluator.time_candidate(evaluator.fit(simplest_choice))


def _try(
    evaluator: Evaluator, some: Iterable[ParallelLayout], processes: int, constraints: Constraints
) -> list[_Tried]:
    results = (_try_layout(evaluator, layout, processes, constraints) for layout in some)
    return [result for result in results if result is not None]


def _try_layout(
    evaluator: Evaluator, layout: ParallelLayout, processes: int, constraints: Constraints
) -> _Tried | None:
    """Return the fastest trial of a layout, or None if no micro-batch size is possible.

    On a CPU fewer threads are tried too, where they were measured.
    """
    candidates = [
        _try_threads(evaluator, layout, processes, constraints, threads)
        for threads in evaluator.rates.threads(processes)
    ]
    results = [result for result in candidates if result is not None]
    return min(results, key=lambda one: one.fastest, default=None)


def _try_threads(
    evaluator: Evaluator, layout: ParallelLayout, processes: int, constraints: Constraints, threads: int | None
) -> _Tried | None:
    sizes = list_micro_batches(evaluator.workload, processes, constraints)
    if not sizes:
        return None
    options = list_recomputations(evaluator.workload, constraints)
    rows = {
        option: [
            build_choice(layout, processes, size, option, constraints, evaluator.cluster, threads) for size in sizes
        ]
        for option in options
    }
    fits = _select_fitting(evaluator, rows[options[0]])
    timed_count = _PER_ROW if evaluator.workload.packed and evaluator.cluster.has_gpus else len(sizes)
    if fits and not _may_gain(evaluator, rows[options[0]], fits[:timed_count]):
        options = options[:1]
    least = _find_least(evaluator, rows[options[-1]])
    if not least.fits and least.shortfall < _NEAR:
        least = min((_find_least(evaluator, rows[option]) for option in options), key=lambda one: one.shortfall)
    if not least.fits:
        return _Tried((), least)
    fitting = fits[:timed_count]
    fitting_sizes = {choice.micro_batch_size for choice in fits}  # recomputation would only make these slower
    for option in options[1:]:
        untried_choices = [choice for choice in rows[option] if choice.micro_batch_size not in fitting_sizes]
        fitting += _select_fitting(evaluator, untried_choices)[:timed_count]
    return _Tried(tuple(fitting), least, min(map(evaluator.seconds, fitting)))


def _may_gain(evaluator: Evaluator, choices: list[Choice], fits: list[Choice]) -> bool:
    """Return whether one of ``choices`` that do not fit would be faster than those that do, if recomputation let it."""
    limit = min(map(evaluator.seconds, fits)) / (1 + _RECOMPUTING)
    return any(evaluator.seconds(choice) < limit for choice in choices if choice not in fits)


def _find_least(evaluator: Evaluator, choices: list[Choice]) -> Candidate:
    """Return the choice that needs least memory: the smallest micro-batch, or the one without accumulation."""
    return min((evaluator.fit(choices[0]), evaluator.fit(choices[-1])), key=lambda one: one.shortfall)


def _select_fitting(evaluator: Evaluator, choices: list[Choice]) -> list[Choice]:
    """Return those of ``choices`` that fit; they are sorted by decreasing micro-batch size.

    Memory decreases with the size, except for the first: without accumulation no gradients are kept between
    micro-batches.
    """
    once = [choice for choice in choices[:1] if choice.gradient_accumulation_steps == 1]
    low, high = len(once), len(choices)
    while low < high:
        middle = (low + high) // 2
        if evaluator.fit(choices[middle]).fits:
            high = middle
        else:
            low = middle + 1
    return [choice for choice in once if evaluator.fit(choice).fits] + choices[low:]


_RECOMPUTES = ("none", "selective", "full")


def _compute_simplicity(choice: Choice) -> tuple[int, ...]:
    recompute = choice.activation_checkpointing
    return (
        int(build_layout(choice).offloads),
        STRATEGIES.order(choice.strategy),
        choice.num_processes,
        int(choice.replicate_size > 1),
        _RECOMPUTES.index(recompute) if recompute in _RECOMPUTES else 2,
        int(not choice.reshard_after_forward),
        choice.gradient_accumulation_steps,
    )
