"""Compare a run's first steps with its plan, report where the plan proves wrong, and record the measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from trainwright.engine.events import Event, Notice
from trainwright.machine.cache import try_write
from trainwright.machine.counters import Counters
from trainwright.machine.detect import detect
from trainwright.machine.measured.own_runs import parse_run, remember_run
from trainwright.machine.slowdowns import Slowdown, describe_causes, find_causes
from trainwright.machine.usage import OwnProcess
from trainwright.recipe.observer_spec import ObserverSpec
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.run.observers.hooks import ObservedRun
from trainwright.run.relaunch import REPLAN
from trainwright.run.run_directory import read_plan
from trainwright.utils import heartbeat

# Slow first steps to skip, and steps to judge.
_WARM_UP, _JUDGED = 2, 10
_WRONG = 1.3  # factor of the time, in either direction
_WORTH = 1.2
_LEAST = 0.01
# Causes that are of one run, and say nothing about the next.
_PASSING = ("quota", "load", "own threads", "hypervisor", "memory", "heat")
_KEYS = {
    "train": ("micro_batch_size", "activation_checkpointing"),
    "parallel": ("strategy", "num_processes", "replicate_size", "reshard_after_forward"),
}


def build_observer(run: ObservedRun, _: object) -> PlanWatch | None:
    """Return the observer of a run; None if there is no plan of its number of processes to compare with."""
    watched_plan = WatchedPlan.of(run.directory, read_plan(run.directory), run.may_replan)
    if watched_plan is None or watched_plan.chosen.get("num_processes", run.processes) != run.processes:
        return None
    return PlanWatch(watched_plan, run.emit, run.own)


@dataclass(frozen=True)
class WatchedPlan:
    """The plan of a run: ``predicted``, ``own`` (identifies its kind for the record), ``chosen`` and other
    ``candidates``.

    ``replan``: whether the run changes to another plan automatically.
    """

    run: Path
    predicted: Mapping[str, float]
    own: Mapping[str, Any]
    chosen: Mapping[str, Any]
    candidates: Sequence[Mapping[str, Any]]
    replan: bool

    @classmethod
    def of(cls, run: Path, plan: Mapping[str, Any], replan: bool) -> WatchedPlan | None:
        """Return None if there is nothing to compare with: no plan, or one by datasheets of a described machine."""
        prediction = plan.get("predicted")
        if not isinstance(prediction, dict) or not prediction.get("tokens_per_second"):
            return None
        measured = bool(prediction.get("measured") or prediction.get("calibrated"))
        if not measured and not detect().is_here:
            return None
        candidates = [*plan.get("candidates", ()), *plan.get("rivals", ())]
        return cls(run, prediction, plan.get("own_runs") or {}, plan.get("chosen") or {}, candidates, replan)


class PlanWatch:
    """Observer of rank 0's events; ``emit`` records further events. ``process``: the one of rank 0."""

    def __init__(self, watched: WatchedPlan, emit: Callable[[Event], None], process: OwnProcess) -> None:
        self._watched = watched
        self._emit = emit
        self._process = process
        self._steps: list[tuple[float, float]] = []  # seconds, and tokens per second
        self._before: tuple[Counters, float] | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Compare the steps of an event with the plan."""
        if event["event"] == "step":
            self._step(event)
        elif event["event"] == "finish":
            self._finish(event.get("measured") or {})

    def _step(self, event: Mapping[str, Any]) -> None:
        self._steps.append((float(event["step_time"]), float(event["tokens_per_second"])))
        if len(self._steps) == _WARM_UP:
            self._before = self._process.counters(), heartbeat.sum_collective_seconds()
        if len(self._steps) == _WARM_UP + _JUDGED:
            self._judge(int(event["step"]))

    def _judge(self, step: int) -> None:
        assert self._before is not None
        judged_steps = self._steps[_WARM_UP:]
        tokens = mean(seconds * rate for seconds, rate in judged_steps)  # steps differ in their number
        expected = tokens / self._watched.predicted["tokens_per_second"]
        actual = tokens / median(rate for _, rate in judged_steps)
        if expected / _WRONG <= actual <= expected * _WRONG:
            return
        causes = self._outside() if actual > expected else []
        cause = describe_causes(causes) if causes else self._inside()
        offer = None if actual < expected else self._offer(actual, min(_compute_slowdown(causes), actual / expected))
        message = (
            f"the plan expected {expected:.3g} s per step, and the first {_JUDGED} took {actual:.3g} s each: {cause}"
        )
        if offer is not None:
            message += f". {_describe_offer(offer, actual)}"
            if self._watched.replan:
                message += "; the run switches after its next checkpoint (train.replan: auto)"
                try_write(self._watched.run / REPLAN, json.dumps(offer))
        explanation = {"cause": cause, "causes": [slowdown.kind for slowdown in causes], "offer": offer}
        details = {"step": step, "predicted": expected, "measured": actual, **explanation}
        self._emit(Notice(message=message, kind="plan", details=details))

    def _outside(self) -> list[Slowdown]:
        """Return the causes outside the prediction that make steps slow, largest first."""
        assert self._before is not None
        before, wait = self._before
        threads = self._watched.predicted.get("threads")
        elsewhere = heartbeat.sum_collective_seconds() - wait
        return self._process.find_causes(before, elsewhere=elsewhere, planned_threads=threads)

    def _inside(self) -> str:
        if self._watched.chosen.get("compile"):
            return "compiled models are predicted less accurately; the next plan uses the times of this run"
        return "the prediction was wrong; the next plan uses the times of this run"

    def _offer(self, measured: float, slower: float) -> dict[str, Any] | None:
        """Return the fastest of the other candidates, if it is much faster even when slowed by the same cause.

        The error found for a number of processes and a precision is assumed for their other strategies, too.
        """
        chosen = self._watched.chosen
        alternatives = [one for one in self._watched.candidates if one.get("time") and _is_different(one, chosen)]
        if self._watched.replan:
            alternatives = [one for one in alternatives if _is_same_run(one, chosen)]
        best = min(alternatives, key=lambda one: one["time"]["seconds"], default=None)
        if best is None or best["time"]["seconds"] * slower * _WORTH > measured:
            return None
        names = [name for keys in _KEYS.values() for name in keys] + ["mixed_precision", "threads"]
        return {**{name: best[name] for name in names}, "seconds": best["time"]["seconds"] * slower}

    def _finish(self, measured: Mapping[str, float]) -> None:
        """Record the measurement, unless something else slowed the run down."""
        machine = detect()
        causes = find_causes(measured, elsewhere=measured.get("in_collectives", 0.0))
        if any(cause.kind in _PASSING for cause in causes) or measured.get("steps", 0) < _JUDGED or not machine.is_here:
            return
        prediction = self._watched.predicted
        plain = prediction["tokens_per_second"] * (prediction.get("correction") or 1.0)
        planned_bytes = prediction.get("memory_bytes")
        memory = measured.get("memory_bytes", 0.0) / planned_bytes if planned_bytes else None
        if (run := parse_run(self._watched.own, plain / measured["tokens_per_second"], memory)) is not None:
            remember_run(machine, run)


def _compute_slowdown(causes: Sequence[Slowdown]) -> float:
    """Return the factor by which causes make steps slower."""
    if any(cause.kind == "memory" for cause in causes):
        return math.inf
    return math.prod(1 / max(_LEAST, 1 - cause.share) for cause in causes)


def _is_different(one: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    return any(one.get(key) != chosen.get(key) for key in ("num_processes", "mixed_precision", "threads"))


def _is_same_run(one: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    """Return whether losses stay the same and the checkpoint can be loaded."""
    strategies = {one["strategy"], chosen.get("strategy")}
    are_known = strategies <= {*STRATEGIES.names()}
    can_change = are_known and all(look_up_strategy(name).changes_in_run for name in strategies)
    return can_change and one["mixed_precision"] == chosen.get("mixed_precision")


def _describe_offer(offer: Mapping[str, Any], measured: float) -> str:
    parts = [f"parallel.strategy={offer['strategy']}", f"parallel.num_processes={offer['num_processes']}"]
    parts.append(f"train.mixed_precision={offer['mixed_precision']}")
    return f"{' '.join(parts)} is expected to be {measured / offer['seconds']:.1f} times as fast"


PLAN_WATCH = ObserverSpec(
    "A comparison of the first steps with the plan.", create="trainwright.planning.plan_watch:build_observer"
)
