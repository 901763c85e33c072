"""What `auto` gives away on this machine: every precision, number of processes and of threads run for real."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from support.peers import cache_directory
from support.runs import print_table
from support.small_recipes import small_recipe
from support.timed_runs import Timed, run_steps
from trainwright.machine.describe import build_cluster
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration
from trainwright.machine.measured.quick import measure_if_needed, select_nearest_block
from trainwright.planning.candidates import Constraints
from trainwright.planning.facts import build_facts
from trainwright.planning.plan import build_constraints, explain_missing_library, make_plan
from trainwright.planning.search import Evaluator, search
from trainwright.planning.step_time.basis import Basis, collect_shapes
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "sft" / "quickstart.yaml"
SHORT = ("evaluate.every=null", "evaluate.max_new_tokens=1", "checkpoint.every=null", "train.compile=false")
WARM_UP = 2
ROUNDS = 2  # over all ways: of each the faster one counts
NEAR = 1.15  # times the fastest, of what is run in the second round too


@dataclass
class Way:
    """One precision, number of processes and of threads, with the best that plans find for it.

    ``tokens``: of the step that ``predicted`` and ``seconds`` are of; the steps that run have more or fewer.
    """

    choice: Choice
    predicted: Mapping[str, float]
    tokens: float
    runs: list[Timed] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.tokens * min(run.seconds_per_token for run in self.runs)

    @property
    def name(self) -> str:
        choice = self.choice
        precision = "fp32" if choice.mixed_precision == "no" else choice.mixed_precision
        return f"{precision}, {choice.num_processes} x {choice.threads} threads, {choice.strategy}"


def recipes(work: Path) -> dict[str, RecipeSchema]:
    """The quickstart's, and another shape."""
    return {
        "quickstart": load_recipe(QUICKSTART, [*SHORT, "logging.observers.tensorboard=false"]),
        "narrow": small_recipe("narrow", 128, 512, 16, work, ()),
    }


def run_here(
    machine: Machine, calibration: Calibration | None, work: Path, steps: int, only: str = ""
) -> list[dict[str, Any]]:
    """Measure every recipe whose name has ``only``; prints each as it is done."""
    found = []
    for name, recipe in recipes(work).items():
        if only not in name:
            continue
        found.append({"recipe": name, **_result(recipe, machine, calibration, work / name, steps)})
        _print(found[-1])
    return found


def _result(
    recipe: RecipeSchema, machine: Machine, calibration: Calibration | None, work: Path, steps: int
) -> dict[str, Any]:
    begun = time.monotonic()
    _run(recipe, machine, _ways(recipe, machine, calibration)[0].choice, 1, work / "first")  # prepares the data
    facts = build_facts(recipe)
    basis = _measured_now(machine, facts.workload)
    ways = _ways(recipe, machine, calibration)
    plans = {"measured": basis} | ({"calibrated": Basis(calibration, basis.measurement)} if calibration else {})
    cluster, constraints = build_cluster(machine), build_constraints(recipe)
    chosen = {
        key: make_plan(constraints, facts.workload, cluster, facts.assumptions, one, explain_missing_library).chosen
        for key, one in plans.items()
    }
    for number in range(ROUNDS):
        fastest = min((way.seconds for way in ways if way.runs), default=0.0)
        for place, way in enumerate(ways):
            if not number or way.seconds <= NEAR * fastest:
                way.runs.append(_run(recipe, machine, way.choice, steps, work / f"{number}-{place}"))
    ways.sort(key=lambda way: way.seconds)
    of_plans = {key: _beside(one.choice, ways, key) for key, one in chosen.items()}
    return {
        "best": ways[0].name,
        "chosen": of_plans,
        "ways": [_in_json(way) for way in ways],
        "errors": {key: _errors(ways, key) for key in plans},
        "others": max(run.others for way in ways for run in way.runs),
        "seconds": time.monotonic() - begun,
    }


def _measured_now(machine: Machine, workload: Workload) -> Basis:
    """The basis of a plan on a machine that has not been calibrated, whether or not this one has."""
    shapes = collect_shapes(workload)
    found = measure_if_needed(machine, shapes)
    assert found.calibration is not None, found.trouble
    return Basis(None, select_nearest_block(found.calibration, shapes.limit_size(machine.device).block))


def _ways(recipe: RecipeSchema, machine: Machine, calibration: Calibration | None) -> list[Way]:
    workload, cluster = build_facts(recipe).workload, build_cluster(machine)
    basis = _measured_now(machine, workload)
    evaluators = {
        "measured": Evaluator(workload, cluster, Rates(cluster, None, basis.measurement), explain_missing_library)
    }
    if calibration is not None:
        evaluators["calibrated"] = Evaluator(
            workload, cluster, Rates(cluster, calibration, basis.measurement), explain_missing_library
        )
    found = []
    for constraints, threads in _constraints(build_constraints(recipe), workload, machine):
        best = search(evaluators["measured"], constraints).best
        if best is not None:
            choice = replace(best.choice, threads=threads)
            predicted = {key: evaluator.seconds(choice) for key, evaluator in evaluators.items()}
            found.append(Way(choice, predicted, workload.tokens))
    return found


def _constraints(own: Constraints, workload: Workload, machine: Machine) -> Iterator[tuple[Constraints, int]]:
    """{fp32, bf16} x {1, 2 processes} x threads."""
    for precision in ("no", "bf16"):
        for processes in (1, 2):
            most = max(1, machine.cpu_cores // processes)
            if processes > min(machine.cpu_cores, workload.global_batch_rows):
                continue
            for threads in sorted({1, max(1, most // 2), most}):
                fixed = {**own.fixed, "mixed_precision": precision, "num_processes": processes}
                yield replace(own, fixed=fixed), threads


def _run(recipe: RecipeSchema, machine: Machine, choice: Choice, steps: int, directory: Path) -> Timed:
    train = {
        "micro_batch_size": choice.micro_batch_size,
        "activation_checkpointing": choice.activation_checkpointing,
        "mixed_precision": choice.mixed_precision,
        "compile": False,
    }
    parallel = {key: getattr(choice, key) for key in ("strategy", "num_processes", "reshard_after_forward")}
    values = recipe.model_dump()
    values["train"].update(train)
    values["parallel"].update(parallel, device="cpu")
    values["checkpoint"]["keep_best"] = False
    made = type(recipe).model_validate(values)
    return run_steps(made, machine, steps + WARM_UP, WARM_UP, directory, cache_directory(), choice.threads)


def _beside(choice: Choice, ways: list[Way], key: str) -> dict[str, Any]:
    """What a plan chose, beside the best and beside what it expected."""
    same = ("mixed_precision", "num_processes", "threads")
    way = next(way for way in ways if all(getattr(way.choice, name) == getattr(choice, name) for name in same))
    return {
        "name": way.name,
        "seconds": way.seconds,
        "regret": way.seconds / ways[0].seconds - 1,
        "error": way.predicted[key] / way.seconds - 1,
    }


def _errors(ways: list[Way], key: str) -> dict[str, float]:
    errors = [abs(way.predicted[key] / way.seconds - 1) for way in ways]
    return {"median": statistics.median(errors), "worst": max(errors)}


def _in_json(way: Way) -> dict[str, Any]:
    return {
        "name": way.name,
        "seconds": way.seconds,
        "predicted": dict(way.predicted),
        "choice": asdict(way.choice),
        "runs": [asdict(run) for run in way.runs],
    }


def _print(result: Mapping[str, Any]) -> None:
    print(f"{result['recipe']}: {len(result['ways'])} ways in {result['seconds']:.0f} s")
    rows = [
        (way["name"], f"{way['seconds']:.3f}", *(f"{seconds:.3f}" for seconds in way["predicted"].values()))
        for way in result["ways"]
    ]
    print_table(("way", "seconds", *(f"by {key}" for key in result["ways"][0]["predicted"])), rows)
    for key, chosen in result["chosen"].items():
        print(
            f"  auto ({key}) chose {chosen['name']}: {chosen['regret']:.1%} slower than the best, its step predicted "
            f"{chosen['error']:+.0%} off"
        )
    print(f"  others used up to {result['others']:.2f} cores", flush=True)
