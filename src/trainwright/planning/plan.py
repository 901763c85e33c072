"""Make the plan of a run: the choice for a recipe on a machine, its reasons, and its predicted memory and time.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from trainwright.errors import MachineError, RequestError
from trainwright.machine.describe import Cluster
from trainwright.machine.measured.own_runs import Correction
from trainwright.machine.processor import explain_no_compile
from trainwright.machine.vendors import explain_missing_feature
from trainwright.planning.candidates import (
    LAYOUT_KEYS,
    Constraints,
    choose_hardware_precision,
    list_precisions,
    list_worlds,
)
from trainwright.planning.errors import SHARE, Errors
from trainwright.planning.reasons import (
    Suggestion,
    describe_shortage,
    explain_attention,
    find_suggestions,
    iterate_reasons,
)
from trainwright.planning.search import Candidate, Evaluator, SearchResult, search
from trainwright.planning.step_time.basis import Basis, build_corrections, build_model_key, build_way_key
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.workload import MixedPrecision, Workload
from trainwright.recipe.checks import find_implied_strategy, list_contradictions, list_usable_processes, set_processes
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.parallel import ParallelSection, ProcessRange
from trainwright.recipe.strategy_spec import look_up_strategy

# Typical compile time of a block on the measured machines; compiling must save several times that.
_COMPILE_SECONDS = 60.0
_WORTH_COMPILING = 3.0
# A lower precision is chosen only if its step takes at most this share of the fp32 step's time.
_WORTH_ROUNDING = 0.97
_NAMES: dict[MixedPrecision, str] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class RunPlan:
    """The chosen candidate of a run, with all others, reasons and assumptions.

    ``chosen``: the candidate that runs, or, if ``fits`` is false, the one nearest to fitting; ``suggestions`` then
    lists changes that help. ``rivals``: the best candidate in each other precision that was considered.
    """

    workload: Workload
    cluster: Cluster
    constraints: Constraints
    chosen: Candidate
    search: SearchResult
    suggestions: tuple[Suggestion, ...]
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]
    basis: Basis
    rivals: tuple[Candidate, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether times are predicted from rates measured by ``trainwright machine calibrate``."""
        return self.basis.calibration is not None

    @property
    def correction(self) -> Correction:
        """The correction of the step time from this machine's own runs; it is already applied."""
        return build_corrections(self.basis.runs, self.workload, self.basis.kind).of(self.chosen.choice)

    @property
    def attention(self) -> tuple[str, ...]:
        """The kernels that compute the attention of a text model in training, each with the reasons."""
        return tuple(explain_attention(self.workload, self.chosen.choice, self.cluster))

    @property
    def fits(self) -> bool:
        """Whether the chosen candidate fits and can run."""
        return self.chosen.runs

    @property
    def is_close(self) -> bool:
        """Whether the chosen candidate is close to the memory limit and should be tried first."""
        return self.chosen.is_close

    def predicted(self) -> dict[str, float]:
        """Return the predictions that are compared with the run: bytes per process, seconds per step, threads per
        process.

        ``mfu`` is left out if the peak rate is unknown; ``nominal_peak`` is 1 if it is that of a datasheet.
        ``calibrated`` and ``measured`` are 1 if times are from rates that the calibration or the quick measurement
        found on this machine. ``correction``: the factor on the step time from this machine's own runs. The ``low`` and
        ``high`` of memory and speed are the interval of measured to predicted values of such runs, see `Errors`.
        """
        errors, time = self.chosen.errors, self.chosen.time
        predicted: dict[str, float] = {
            "memory_bytes": self.chosen.memory.total,
            "tensors_bytes": self.chosen.memory.allocated,
            "memory_low": errors.memory.low,
            "memory_high": errors.memory.high,
        }
        if time is not None:
            predicted["step_time"] = time.seconds
            predicted["tokens_per_second"] = time.tokens_per_second
            if time.mfu is not None:
                predicted["mfu"] = time.mfu
                predicted["nominal_peak"] = float(time.peak_is_nominal)
            predicted["calibrated"] = float(self.calibrated)
            predicted["correction"] = self.correction.seconds
            predicted["speed_low"] = errors.speed.low
            predicted["speed_high"] = errors.speed.high
            predicted["measured"] = float(self.basis.measurement is not None)
        if self.chosen.choice.threads is not None:
            predicted["threads"] = self.chosen.choice.threads
        return predicted

    def as_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON values, as written to plan.json."""
        return {
            "machine": self.cluster.name,
            "planned_only": self.cluster.planned_only,
            "fits": self.fits,
            "calibrated": self.calibrated,
            "measured": self.basis.measurement is not None,
            "trouble": self.basis.trouble,
            "own_runs": {
                "model": build_model_key(self.workload),
                "way": build_way_key(self.chosen.choice),
                "basis": self.basis.kind,
                **asdict(self.correction),
            },
            "chosen": _convert_candidate(self.chosen),
            "predicted": self.predicted(),
            "errors": _convert_errors(self.chosen),
            "reasons": list(self.reasons),
            "attention": list(self.attention),
            "assumptions": list(self.assumptions),
            "workload": _convert_workload(self.workload),
            "candidates": [_convert_candidate(candidate) for candidate in self.search.candidates],
            "rivals": [_convert_candidate(candidate) for candidate in self.rivals],
            "ways_out": [
                {"change": way.change, "chosen": _convert_candidate(way.candidate)} for way in self.suggestions
            ],
        }

    def refuse_shortage(self) -> None:
        """Raise MachineError with the nearest candidate and the suggestions if nothing fits."""
        if not self.fits:
            raise MachineError(describe_shortage(self.chosen, self.cluster, self.suggestions))


def make_plan(
    constraints: Constraints,
    workload: Workload,
    cluster: Cluster,
    assumptions: tuple[str, ...] = (),
    basis: Basis = Basis(),  # noqa: B008
    available: Callable[[str], str | None] = lambda strategy: None,
    own: Errors | None = None,
) -> RunPlan:
    """Return the plan with the fastest candidate for ``workload`` that fits ``cluster`` and satisfies ``constraints``.

    ``basis``: measurements on that machine. ``available``: maps a strategy to None, or to the reason why it cannot run
    there. ``own``: prediction errors of runs on that machine; None uses those of runs of the same kind elsewhere.

    Raises:
        RequestError: no number of processes satisfies ``constraints``.
        MachineError: the blocks are to be compiled, but this machine has no compiler.
    """
    no_compile_reason = _explain_no_compile(cluster)
    if constraints.fixed.get("compile") and no_compile_reason is not None:
        remedy = "install it, or set train.compile to false"
        raise MachineError(f"train.compile: torch.compile {no_compile_reason}; {remedy}")
    corrections = build_corrections(basis.runs, workload, basis.kind)
    rates = Rates(cluster, basis.calibration, basis.measurement)
    possible = partial(_explain_impossible_strategy, cluster, available)
    evaluator = Evaluator(workload, cluster, rates, possible, own or corrections.errors(), corrections=corrections)
    result, precision, rivals = _search_precisions(evaluator, constraints)
    if not result.candidates:
        raise RequestError(_describe_impossible(constraints, workload, cluster))
    candidate = result.best or result.nearest
    if result.best is not None:
        candidate = _try_compiled(evaluator, constraints, candidate)
    out = () if candidate.runs else tuple(find_suggestions(evaluator, constraints, candidate))
    return RunPlan(
        workload=workload,
        cluster=cluster,
        constraints=constraints,
        chosen=candidate,
        search=result,
        suggestions=out,
        reasons=tuple(iterate_reasons(candidate, result, constraints, workload, cluster, precision, no_compile_reason)),
        assumptions=(*_describe_rates(basis), *_explain_bound(workload, candidate), *cluster.assumptions, *assumptions),
        basis=basis,
        rivals=rivals,
    )


_Chosen = tuple[SearchResult, tuple[str, str] | None, tuple[Candidate, ...]]


def _search_precisions(evaluator: Evaluator, constraints: Constraints) -> _Chosen:
    """Return the search in the fastest precision, the reason for it, and the best candidates in other precisions.

    The reason is a pair of precision and text, or None if the recipe sets the precision.
    """
    options = list_precisions(constraints, evaluator.rates)
    results = {precision: search(evaluator, replace(constraints, precision=precision)) for precision in options}
    searches = {precision: result for precision, result in results.items() if result.candidates}
    if len(searches) < 2:
        why = None if "mixed_precision" in constraints.fixed else choose_hardware_precision(evaluator.cluster)
        return next(iter((searches or results).values())), why, ()
    runs = {precision: result for precision, result in searches.items() if result.best is not None}
    if not runs:
        choice = min(searches, key=lambda precision: searches[precision].nearest.shortfall)
        return searches[choice], (choice, f"nearer to fitting than {' or '.join(_list_others(searches, choice))}"), ()
    if len(runs) == 1:
        (choice, result) = next(iter(runs.items()))
        return result, (choice, f"with {' or '.join(_list_others(searches, choice))} nothing fits"), ()
    plain, low = runs["no"].fastest, runs["bf16"].fastest
    choice = "bf16" if low < _WORTH_ROUNDING * plain else "no"
    rivals = tuple(result.best for precision, result in runs.items() if precision != choice and result.best is not None)
    return runs[choice], (choice, _explain_precision(evaluator, choice, plain, low)), rivals


def _list_others(results: Mapping[MixedPrecision, SearchResult], chosen: MixedPrecision) -> list[str]:
    return [_NAMES[precision] for precision in results if precision != chosen]


def _explain_precision(evaluator: Evaluator, chosen: MixedPrecision, plain: float, low: float) -> str:
    """Return the reason for a precision, from the times of a step and the measured rates of matrix products."""
    single, half = evaluator.rates.peak(1, "fp32"), evaluator.rates.peak(1, "bf16")
    products = f"bf16 {half / single:.2f} times fp32 here (measured), " if single and half else ""
    if chosen == "bf16":
        return f"{products}a step in fp32 takes {plain / low:.2f} times as long"
    return f"{products}a step in bf16 takes {low / plain:.2f} times as long, so fp32"


def _explain_bound(workload: Workload, chosen: Candidate) -> tuple[str, ...]:
    """Return why the model could not be traced, if so."""
    why, family = chosen.memory.untraced, workload.facts.family
    return (f"{family} cannot be traced ({why}): activations are planned by a bound",) if why else ()


def _describe_rates(basis: Basis) -> tuple[str, ...]:
    calibration, load = basis.calibration, () if basis.load is None else (basis.load,)
    if calibration is None or calibration.unreliable_reason is None:
        return load
    return (
        *load,
        f"the calibration is unreliable: {calibration.unreliable_reason}; run `trainwright machine calibrate` again",
    )


def build_constraints(recipe: RecipeSchema) -> Constraints:
    """Return the constraints of a recipe: every key that is not ``auto``, and those of a named strategy."""
    train, parallel = recipe.train, recipe.parallel
    names = ("micro_batch_size", "gradient_accumulation_steps", "mixed_precision", "activation_checkpointing")
    recipe_values: dict[str, Any] = {"strategy": parallel.strategy, "num_processes": parallel.processes}
    recipe_values |= {name: getattr(train, name) for name in (*names, "compile")}
    elastic = parallel.num_processes
    if isinstance(elastic, ProcessRange):
        del recipe_values["num_processes"]
    fixed_values = {key: value for key, value in recipe_values.items() if value != "auto"}
    if train.activation_offload:
        fixed_values["activation_offload"] = True
    strategy = find_implied_strategy(parallel.model_copy(update={"strategy": "auto"}))

    def why_not(processes: int, given_up: frozenset[str]) -> str:
        problems = list_contradictions(set_processes(_set_to_auto(recipe, given_up), processes))
        return f"{problems[0].keys[0]}: {problems[0].message}" if problems else ""

    return Constraints(
        {**fixed_values, **_select_layout_constraints(parallel)},
        bound=frozenset() if strategy is None else frozenset(["strategy"]),
        why_not=why_not,
        worlds=_list_worlds_in_range(recipe, elastic) if isinstance(elastic, ProcessRange) else (),
    )


def _list_worlds_in_range(recipe: RecipeSchema, process_range: ProcessRange) -> tuple[int, ...]:
    """Return the numbers of processes of a range to try: the largest with which each has an example, then the largest.

    Raises RequestError as ``list_usable_processes``.
    """
    usable, rows = list_usable_processes(recipe, process_range), recipe.batch_rows
    return tuple(dict.fromkeys((max((n for n in usable if n <= rows), default=usable[0]), usable[-1])))


def _set_to_auto(recipe: RecipeSchema, given_up: frozenset[str]) -> RecipeSchema:
    sections = {
        name: section.model_copy(update={key: "auto" for key in given_up if key in type(section).model_fields})
        for name, section in (("train", recipe.train), ("parallel", recipe.parallel))
    }
    return recipe.model_copy(update=sections)


def _select_layout_constraints(parallel: ParallelSection) -> Mapping[str, Any]:
    """Return the layout keys that are constraints: those in the recipe, also with their default values."""
    if parallel.deepspeed_config is not None:  # the file defines these values
        return {key: getattr(parallel, key) for key in LAYOUT_KEYS}
    set_keys = {*parallel.changed(), *parallel.model_fields_set}
    return {key: getattr(parallel, key) for key in LAYOUT_KEYS if key in set_keys}


def _try_compiled(evaluator: Evaluator, constraints: Constraints, chosen: Candidate) -> Candidate:
    """Return the compiled candidate if the run is long enough for that to pay off and the recipe leaves it open."""
    steps = evaluator.workload.steps
    if "compile" in constraints.fixed or steps is None or _explain_no_compile(evaluator.cluster) is not None:
        return chosen
    compiled_candidate = evaluator.fit(replace(chosen.choice, compile=True))
    if not compiled_candidate.runs:
        return chosen
    savings = (evaluator.seconds(chosen.choice) - evaluator.seconds(compiled_candidate.choice)) * steps
    return evaluator.time_candidate(compiled_candidate) if savings > _WORTH_COMPILING * _COMPILE_SECONDS else chosen


def _explain_no_compile(cluster: Cluster) -> str | None:
    """Return why blocks cannot be compiled; a described machine is assumed to have compilers."""
    return explain_no_compile(cluster.device, cluster.card.capability) if cluster.is_here else None


def _explain_impossible_strategy(cluster: Cluster, available: Callable[[str], str | None], strategy: str) -> str | None:
    """Return why a strategy cannot run with these packages and on these devices, or None if it can."""
    library = look_up_strategy(strategy).library
    missing_feature = None if library is None else explain_missing_feature(cluster.card.vendor, library.module)
    return available(strategy) or missing_feature


def explain_missing_library(strategy: str) -> str | None:
    """Return why a strategy cannot run with the installed packages, or None if it can."""
    library = look_up_strategy(strategy).library
    return f"{library.title} is not installed" if library is not None and library.is_missing else None


def _describe_impossible(constraints: Constraints, workload: Workload, cluster: Cluster) -> str:
    if not list_worlds(workload, cluster, constraints) and (why := constraints.why_not(1, constraints.given_up)):
        return why  # whatever is asked of the processes
    constraint_text = ", ".join(f"{key} {value}" for key, value in constraints.fixed.items())
    rows = "packs" if workload.packed else "rows"
    return (
        f"no number of processes and strategy match all of {constraint_text} for a global batch of "
        f"{workload.global_batch_rows:.0f} {rows}; set one of them to auto"
    )


def _convert_workload(workload: Workload) -> dict[str, Any]:
    model = asdict(workload.model)
    model["configuration"], model["adapter"] = json.loads(model["configuration"]), dict(workload.model.adapter_section)
    return {**asdict(workload), "model": model, "facts": asdict(workload.facts)}


def _convert_errors(candidate: Candidate) -> dict[str, Any]:
    """Return the intervals of the predictions; ``share`` of the measured runs of this kind lie within them."""
    errors, time = candidate.errors, candidate.time
    values: dict[str, Any] = {"kinds": list(errors.kinds), "share": SHARE}
    values["memory_bytes"] = [round(value) for value in errors.memory.of(candidate.memory.total)]
    if time is not None:
        values["tokens_per_second"] = list(errors.speed.of(time.tokens_per_second))
        values["step_time"] = [time.seconds / errors.speed.high, time.seconds / errors.speed.low]
    return {**values, "memory_runs": errors.memory.runs, "speed_runs": errors.speed.runs}


_OF_CANDIDATE = (
    *("fits", "verdict", "missing", "needed_bytes", "available_bytes"),
    *("host_needed_bytes", "host_available_bytes"),
)


def _convert_candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        **asdict(candidate.choice),
        **{name: getattr(candidate, name) for name in _OF_CANDIDATE},
        "needed_interval": list(candidate.needed_interval),
        "memory": asdict(candidate.memory),
        "time": None if candidate.time is None else candidate.time.as_json(),
    }
