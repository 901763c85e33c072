"""The plan of a run: what is chosen for a recipe on a machine, why, and what it is expected to need.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainwright.errors import MachineError, RequestError
from trainwright.machine.describe import Cluster
from trainwright.machine.measured.own_runs import Correction
from trainwright.planning.candidates import Wishes, precision_of, precisions
from trainwright.planning.errors import SHARE, Errors
from trainwright.planning.processes import with_processes
from trainwright.planning.reasons import reasons_of, shortage
from trainwright.planning.search import Found, Judge, Judged, search
from trainwright.planning.step_time.basis import Basis
from trainwright.planning.step_time.corrections import corrections_of, model_of, way_of
from trainwright.planning.step_time.rates import rates_of
from trainwright.planning.suggestions import WayOut, ways_out
from trainwright.planning.workload import MixedPrecision, Workload
from trainwright.recipe.checks import contradictions, implied_strategy
from trainwright.recipe.schema import ParallelSection, Recipe
from trainwright.recipe.strategy_spec import spec_of

# Compiling a block takes about this long on the machines it was measured on, and pays where it saves a few times that.
_COMPILE_SECONDS = 60.0
_WORTH_COMPILING = 3.0
# A lower precision has to be so much faster to be taken: as fast, fp32 is the better one.
_WORTH_ROUNDING = 0.97
_NAMES: dict[MixedPrecision, str] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_LAYOUT_KEYS = ("replicate_size", "reshard_after_forward", "offload_parameters", "offload_optimizer")


@dataclass(frozen=True)
class Plan:
    """``chosen``: what runs; with ``fits`` false the nearest to it, and then ``ways_out`` say what would fit.

    ``rivals``: the best in every other precision that was looked at.
    """

    workload: Workload
    cluster: Cluster
    wishes: Wishes
    chosen: Judged
    found: Found
    ways_out: tuple[WayOut, ...]
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]
    basis: Basis
    rivals: tuple[Judged, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether times are from rates measured here by ``trainwright machine calibrate``."""
        return self.basis.calibration is not None

    @property
    def correction(self) -> Correction:
        """Of the step time, by what this machine's own runs took; it has been made."""
        return corrections_of(self.basis.runs, self.workload, self.basis.kind).of(self.chosen.choice)

    @property
    def fits(self) -> bool:
        """Return whether the chosen candidate runs."""
        return self.chosen.runs

    @property
    def is_close(self) -> bool:
        """Whether it is so near to the limit that it should be tried before it is trusted."""
        return self.chosen.is_close

    def values(self) -> dict[str, dict[str, Any]]:
        """Return what the plan puts in the place of ``auto``, by section and key of a recipe."""
        choice = self.chosen.choice
        train = {
            "mixed_precision": choice.mixed_precision,
            "activation_checkpointing": choice.activation_checkpointing,
            "compile": choice.compile,
        }
        if not (self.workload.packed and "gradient_accumulation_steps" in self.wishes.fixed):
            train["micro_batch_size"] = choice.micro_batch_size
        parallel = {key: getattr(choice, key) for key in ("strategy", "num_processes", *_LAYOUT_KEYS)}
        return {"train": train, "parallel": parallel}

    def predicted(self) -> dict[str, float]:
        """Return what is compared with the run afterwards: bytes of a process, seconds of a step, threads of a process.

        ``calibrated`` and ``measured`` are 1 where the times are from rates measured on this machine, in a minute and
        in a few seconds. ``correction``: what the step's time was multiplied by, for what this machine's own runs took.
        """
        predicted: dict[str, float] = {
            "memory_bytes": self.chosen.memory.total,
            "tensors_bytes": self.chosen.memory.tensors,
        }
        if self.chosen.time is not None:
            predicted["step_time"] = self.chosen.time.seconds
            predicted["tokens_per_second"] = self.chosen.time.tokens_per_second
            if self.chosen.time.mfu is not None:
                predicted["mfu"] = self.chosen.time.mfu
            predicted["calibrated"] = float(self.calibrated)
            predicted["correction"] = self.correction.seconds
            predicted["measured"] = float(self.basis.measurement is not None)
        if self.chosen.choice.threads is not None:
            predicted["threads"] = self.chosen.choice.threads
        return predicted

    def as_json(self) -> dict[str, Any]:
        """Everything, for plan.json and for other programs."""
        return {
            "machine": self.cluster.name,
            "planned_only": self.cluster.planned_only,
            "fits": self.fits,
            "calibrated": self.calibrated,
            "measured": self.basis.measurement is not None,
            "trouble": self.basis.trouble,
            "own_runs": {
                "model": model_of(self.workload),
                "way": way_of(self.chosen.choice),
                "basis": self.basis.kind,
                **asdict(self.correction),
            },
            "chosen": _judged_json(self.chosen),
            "predicted": self.predicted(),
            "errors": _errors_json(self.chosen),
            "reasons": list(self.reasons),
            "assumptions": list(self.assumptions),
            "workload": _workload_json(self.workload),
            "candidates": [_judged_json(one) for one in self.found.judged],
            "rivals": [_judged_json(one) for one in self.rivals],
            "ways_out": [{"change": way.change, "chosen": _judged_json(way.judged)} for way in self.ways_out],
        }

    def refuse_shortage(self) -> None:
        """Raise MachineError with the nearest miss and the ways out, where nothing fits."""
        if not self.fits:
            raise MachineError(shortage(self.chosen, self.cluster, self.ways_out))


def make_plan(
    wishes: Wishes,
    workload: Workload,
    cluster: Cluster,
    assumptions: tuple[str, ...] = (),
    basis: Basis = Basis(),  # noqa: B008
    available: Callable[[str], str | None] = lambda strategy: None,
    own: Errors | None = None,
) -> Plan:
    """Return the fastest way of doing ``workload`` on ``cluster`` that fits and keeps to ``wishes``.

    ``basis``: what was measured there. ``available``: asked for a strategy; gives None, or the reason why it does not
    run there. ``own``: errors of plans of runs on that machine; None: those of runs of the same kind elsewhere.

    Raises:
        RequestError: wishes that no number of processes agrees with.
    """
    corrections = corrections_of(basis.runs, workload, basis.kind)
    rates = rates_of(cluster, basis.calibration, basis.measurement)
    judge = Judge(workload, cluster, rates, available, own or corrections.errors(), corrections=corrections)
    found, precision, rivals = _in_precision(judge, wishes)
    if not found.judged:
        raise RequestError(_impossible(wishes, workload))
    chosen = found.best or found.nearest
    if found.best is not None:
        chosen = _perhaps_compiled(judge, wishes, chosen)
    out = () if chosen.runs else tuple(ways_out(judge, wishes, chosen))
    return Plan(
        workload=workload,
        cluster=cluster,
        wishes=wishes,
        chosen=chosen,
        found=found,
        ways_out=out,
        reasons=tuple(reasons_of(chosen, found, wishes, workload, cluster, precision)),
        assumptions=(*_rates(basis), *cluster.assumptions, *assumptions),
        basis=basis,
        rivals=rivals,
    )


_Chosen = tuple[Found, tuple[str, str] | None, tuple[Judged, ...]]


def _in_precision(judge: Judge, wishes: Wishes) -> _Chosen:
    """Return the search in the precision that is the fastest here; which that is and why, where it was left open;
    and the best in others.
    """
    options = precisions(wishes, judge.rates)
    tried = {precision: search(judge, replace(wishes, precision=precision)) for precision in options}
    found = {precision: one for precision, one in tried.items() if one.judged}
    if len(found) < 2:
        why = None if "mixed_precision" in wishes.fixed else precision_of(judge.cluster)
        return next(iter((found or tried).values())), why, ()
    runs = {precision: one for precision, one in found.items() if one.best is not None}
    if not runs:
        chosen = min(found, key=lambda precision: found[precision].nearest.shortfall)
        return found[chosen], (chosen, f"nearer to fitting than {' or '.join(_others(found, chosen))}"), ()
    if len(runs) == 1:
        (chosen, one) = next(iter(runs.items()))
        return one, (chosen, f"with {' or '.join(_others(found, chosen))} nothing fits"), ()
    plain, low = runs["no"].fastest, runs["bf16"].fastest
    chosen = "bf16" if low < _WORTH_ROUNDING * plain else "no"
    rivals = tuple(one.best for precision, one in runs.items() if precision != chosen and one.best is not None)
    return runs[chosen], (chosen, _why_precision(judge, chosen, plain, low)), rivals


def _others(found: Mapping[MixedPrecision, Found], chosen: MixedPrecision) -> list[str]:
    return [_NAMES[precision] for precision in found if precision != chosen]


def _why_precision(judge: Judge, chosen: MixedPrecision, plain: float, low: float) -> str:
    """By the step, and by the matrix products alone."""
    single, half = judge.rates.peak(1, "fp32"), judge.rates.peak(1, "bf16")
    products = f"bf16 {half / single:.2f} times fp32 here (measured), " if single and half else ""
    if chosen == "bf16":
        return f"{products}a step in fp32 takes {plain / low:.2f} times as long"
    return f"{products}a step in bf16 takes {low / plain:.2f} times as long, so fp32"


def _rates(basis: Basis) -> tuple[str, ...]:
    calibration = basis.calibration
    if calibration is None or calibration.distrust is None:
        return ()
    return (f"the calibration is not to be trusted: {calibration.distrust}; `trainwright machine calibrate` again",)


def wishes_of(recipe: Recipe) -> Wishes:
    """Return what a recipe fixes: every key that is not ``auto``, and what it says of a strategy that it names."""
    train, parallel = recipe.train, recipe.parallel
    named = {
        "strategy": parallel.strategy,
        "num_processes": parallel.num_processes,
        "micro_batch_size": train.micro_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "mixed_precision": train.mixed_precision,
        "activation_checkpointing": train.activation_checkpointing,
        "compile": train.compile,
    }
    fixed: dict[str, Any] = {key: value for key, value in named.items() if value != "auto"}
    if train.activation_offload:
        fixed["activation_offload"] = True
    implied = implied_strategy(parallel.model_copy(update={"strategy": "auto"}))
    return Wishes(
        {**fixed, **_layout_wishes(parallel)},
        lambda processes, given_up: not contradictions(with_processes(_without(recipe, given_up), processes)),
        frozenset() if implied is None else frozenset(["strategy"]),
    )


def _without(recipe: Recipe, given_up: frozenset[str]) -> Recipe:
    """Return the recipe with these keys left open."""
    sections = {
        name: section.model_copy(update={key: "auto" for key in given_up if key in type(section).model_fields})
        for name, section in (("train", recipe.train), ("parallel", recipe.parallel))
    }
    return recipe.model_copy(update=sections)


def _layout_wishes(parallel: ParallelSection) -> Mapping[str, Any]:
    """Return a default that was written counts where the strategy was written too; of a resolved recipe all is."""
    if parallel.deepspeed_config is not None:  # the file says where its numbers are
        return {key: getattr(parallel, key) for key in _LAYOUT_KEYS}
    fixed = {}
    for key in _LAYOUT_KEYS:
        value = getattr(parallel, key)
        meant = value != type(parallel).model_fields[key].default
        if meant or (key in parallel.model_fields_set and parallel.strategy != "auto"):
            fixed[key] = value
    return fixed


def _perhaps_compiled(judge: Judge, wishes: Wishes, chosen: Judged) -> Judged:
    """Compiled, where the run is long enough for it to pay and the choice is free."""
    steps = judge.workload.steps
    if "compile" in wishes.fixed or steps is None or not _can_compile(judge.cluster):
        return chosen
    compiled = judge.fit(replace(chosen.choice, compile=True))
    if not compiled.runs:
        return chosen
    saved = (judge.seconds(chosen.choice) - judge.seconds(compiled.choice)) * steps
    return judge.timed(compiled) if saved > _WORTH_COMPILING * _COMPILE_SECONDS else chosen


def _can_compile(cluster: Cluster) -> bool:
    from shutil import which

    if cluster.device == "cuda":
        return True  # torch for CUDA comes with Triton
    return any(which(name) for name in ("g++", "clang++"))


def installed(strategy: str) -> str | None:
    """Why a strategy does not run with what is installed here; None where it does."""
    library = spec_of(strategy).library
    return f"{library.title} is not installed" if library is not None and library.is_missing else None


def _impossible(wishes: Wishes, workload: Workload) -> str:
    given = ", ".join(f"{key} {value}" for key, value in wishes.fixed.items())
    rows = "packs" if workload.packed else "rows"
    return (
        f"no number of processes and no strategy agrees with all of {given} for a global batch of "
        f"{workload.global_batch_rows:.0f} {rows}; set one of them to auto"
    )


def _workload_json(workload: Workload) -> dict[str, Any]:
    found = asdict(workload)
    return {**found, "trained": None if workload.trained is None else sorted(map(list, workload.trained))}


def _errors_json(judged: Judged) -> dict[str, Any]:
    """Those that plans of this kind have had: ``share`` of their runs lie in the intervals."""
    errors, time = judged.errors, judged.time
    found: dict[str, Any] = {"kinds": list(errors.kinds), "share": SHARE}
    found["memory_bytes"] = [round(value) for value in errors.memory.of(judged.memory.total)]
    if time is not None:
        found["tokens_per_second"] = list(errors.speed.of(time.tokens_per_second))
        found["step_time"] = [time.seconds / errors.speed.high, time.seconds / errors.speed.low]
    return {**found, "memory_runs": errors.memory.runs, "speed_runs": errors.speed.runs}


def _judged_json(judged: Judged) -> dict[str, Any]:
    return {
        **asdict(judged.choice),
        "fits": judged.fits,
        "verdict": judged.verdict,
        "missing": judged.missing,
        "needed_bytes": judged.needed_bytes,
        "needed_interval": list(judged.needed_interval),
        "available_bytes": judged.available_bytes,
        "host_needed_bytes": judged.host_needed_bytes,
        "host_available_bytes": judged.host_available_bytes,
        "memory": {
            "parts": dict(judged.memory.parts),
            "phases": dict(judged.memory.phases),
            "overhead": dict(judged.memory.overhead),
            "host": dict(judged.memory.host),
        },
        "time": None if judged.time is None else judged.time.as_json(),
    }
