"""How much speed a plan's choice gives away: it and everything else that it could have been, run for real.

    python bench/plan_regret.py                     all recipes, in at most twenty minutes
    python bench/plan_regret.py --minutes 5 --only padded
    python bench/plan_regret.py --here              {fp32, bf16} x {1, 2 processes} x threads, in some minutes
    python bench/plan_regret.py --calibration FILE  one made before, with `trainwright machine calibrate`'s measurements

Every recipe leaves strategy, processes, micro-batch and recomputation to the plan. All that the plan chooses among is
run for a few steps by the product's own workers, what is predicted fastest first; whatever comes near the fastest, and
what the plan chose, is then run again, in turn. Wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.machine import describe, use_cores
from support.peers import cache_directory
from support.regret_here import run_here
from support.results import results_directory
from support.runs import print_table, write_results
from support.small_recipes import calibrated, small_recipe
from support.timed_runs import Timed, run_steps

from trainwright.machine.describe import build_cluster
from trainwright.machine.detect import detect
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration, load_calibration, load_current_calibration
from trainwright.planning.candidates import (
    build_choice,
    build_layout,
    iterate_layouts,
    list_micro_batches,
    list_recomputations,
    list_worlds,
)
from trainwright.planning.facts import build_facts
from trainwright.planning.plan import build_constraints, explain_missing_library, make_plan
from trainwright.planning.search import Evaluator
from trainwright.planning.step_time.basis import Basis
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.workload import Choice
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.process import preload_libraries

RESULTS = results_directory() / "plan_regret.json"
RESULTS_HERE = RESULTS.with_name("plan_regret_here.json")
WARM_UP = 1
NEAR = 1.2  # times the fastest, in the first round, of what is run again
ROUNDS = 2  # that follow the first
FIRST_ROUND = 0.7  # of a recipe's time

# Name: model, mean length of documents, pack length (None: padded rows), examples per step, overrides.
RECIPES: dict[str, tuple[str, int, int | None, int, tuple[str, ...]]] = {
    "narrow packed": ("narrow", 128, 512, 16, ()),
    "narrow padded": ("narrow", 128, None, 16, ()),
    "narrow fp32, large batch": ("narrow", 64, 256, 64, ("train.mixed_precision=no",)),
    "wide packed": ("wide", 256, 512, 8, ()),
    "wide long": ("wide", 1000, 1024, 2, ()),
    "wide LoRA": ("wide", 128, 512, 16, ("model.adapter=lora",)),
    "words": ("words", 128, 512, 8, ()),
    "words LoRA padded": ("words", 128, None, 8, ("model.adapter=lora",)),
    "gpt2 fp32": ("gpt2", 256, 512, 8, ("train.mixed_precision=no",)),
    "gpt2 padded": ("gpt2", 128, None, 8, ()),
}


@dataclass
class Measured:
    """One candidate. ``predicted``: seconds of a step, by datasheet and by calibration."""

    choice: Choice
    predicted: dict[str, float]
    runs: list[Timed] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a step: the best of the runs' medians, as whatever else happens on a machine only slows one down."""
        return min(run.seconds for run in self.runs)

    @property
    def name(self) -> str:
        choice = self.choice
        kept = " kept" if choice.strategy == "fsdp" and not choice.reshard_after_forward else ""
        batch = f"{choice.micro_batch_size} x {choice.gradient_accumulation_steps}"
        return f"{choice.strategy}{kept} on {choice.num_processes}, {batch}, {choice.activation_checkpointing}"


def main() -> None:
    arguments = parse_arguments()
    if arguments.here:
        here(arguments)
        return
    machine, description = detect(), describe(use_cores(detect().cpu_cores))
    preload_libraries()
    names = [name for name in RECIPES if arguments.only in name]
    calibration = calibrated(arguments.calibration, machine)
    each = 60 * arguments.minutes / max(1, len(names))
    results = []
    with tempfile.TemporaryDirectory(prefix="plan-regret-") as temporary:
        for name in names:
            model, length, pack, examples, overrides = RECIPES[name]
            recipe = small_recipe(model, length, pack, examples, Path(temporary), overrides)
            bench = Bench(recipe, machine, calibration, Path(temporary) / name.replace(" ", "-"), arguments.steps)
            results.append({"recipe": name, **bench.result(each)})
            print(in_words(results[-1]), flush=True)
    summary = summarize(results)
    write_results(arguments.output, {"machine": description, "summary": summary, "recipes": results})


def here(arguments: argparse.Namespace) -> None:
    """The quickstart's recipe and another one, by what a plan measures, and by a calibration where there is one."""
    description, machine = describe(use_cores(detect().cpu_cores)), detect()
    preload_libraries()
    calibration = (
        load_calibration(arguments.calibration) if arguments.calibration else load_current_calibration(machine)
    )
    with tempfile.TemporaryDirectory(prefix="plan-regret-") as temporary:
        results = run_here(machine, calibration, Path(temporary), arguments.steps, arguments.only)
    output = RESULTS_HERE if arguments.output == RESULTS else arguments.output
    write_results(output, {"machine": description, "recipes": results})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="for all recipes together (20)")
    parser.add_argument("--steps", type=int, default=6, help=f"steps of a run, {WARM_UP} of them warm-up (6)")
    parser.add_argument("--here", action="store_true", help="what a plan chooses on this machine among a dozen ways")
    parser.add_argument("--only", default="", help="recipes whose name has this")
    parser.add_argument("--calibration", type=Path, help="a file; made anew and written there if it does not exist")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of results")
    return parser.parse_args()


class Bench:
    """One recipe: what is chosen for it, and what everything else would have come to."""

    def __init__(
        self, recipe: RecipeSchema, machine: Machine, calibration: Calibration, work: Path, steps: int
    ) -> None:
        self.recipe, self.machine, self.work, self.steps = recipe, machine, work, steps
        self.cluster, self.constraints = build_cluster(machine), build_constraints(recipe)
        self.calibrations = {"datasheet": None, "calibrated": calibration}
        self.runs = 0

    def result(self, seconds: float) -> dict[str, Any]:
        """Everything measured in about ``seconds``, the fastest first."""
        begun = time.monotonic()
        # Lengths are known exactly once the data has been prepared, which the first run does.
        self.time(self.chosen()["datasheet"])
        chosen = self.chosen()
        candidates = self.candidates()
        wanted = [one for one in candidates if one.choice in chosen.values()]
        others = [one for one in candidates if one not in wanted]
        for one in [*wanted, *others]:
            if one in others and time.monotonic() - begun > FIRST_ROUND * seconds:
                break
            one.runs.append(self.time(one.choice))
        measured = sorted((one for one in candidates if one.runs), key=lambda one: one.seconds)
        near = [one for one in measured if one.seconds <= NEAR * measured[0].seconds or one in wanted]
        for _ in range(ROUNDS):
            for one in near:
                if one in wanted or time.monotonic() - begun < seconds:
                    one.runs.append(self.time(one.choice))
        measured.sort(key=lambda one: one.seconds)
        left_out = [one for one in candidates if not one.runs]
        return {
            "chosen": {key: self.of(choice, measured) for key, choice in chosen.items()},
            "best": in_json(measured[0]),
            "regret": {key: 1 - measured[0].seconds / self.find(c, measured).seconds for key, c in chosen.items()},
            "candidates": [in_json(one) for one in measured],
            "left_out": [{"name": one.name, "predicted": one.predicted} for one in left_out],
            "others": max(run.others for one in measured for run in one.runs),
            "seconds": time.monotonic() - begun,
        }

    def chosen(self) -> dict[str, Choice]:
        """What plans choose that go by datasheets, and by calibration."""
        facts = build_facts(self.recipe)
        return {
            key: make_plan(
                self.constraints,
                facts.workload,
                self.cluster,
                facts.assumptions,
                Basis(calibration),
                explain_missing_library,
            ).chosen.choice
            for key, calibration in self.calibrations.items()
        }

    def candidates(self) -> list[Measured]:
        """All that fit and can run here, the one predicted fastest first; before all others the best of each layout."""
        workload = build_facts(self.recipe).workload
        evaluators = {
            key: Evaluator(workload, self.cluster, Rates(self.cluster, calibration), explain_missing_library)
            for key, calibration in self.calibrations.items()
        }
        found = [
            Measured(choice, {key: evaluator.seconds(choice) for key, evaluator in evaluators.items()})
            for choice in self.choices()
            if evaluators["datasheet"].fit(choice).runs
        ]
        found.sort(key=lambda one: min(one.predicted.values()))
        first = {(build_layout(one.choice), one.choice.num_processes): one for one in reversed(found)}
        return sorted(found, key=lambda one: one not in first.values())

    def choices(self) -> Iterator[Choice]:
        workload, cluster, constraints = build_facts(self.recipe).workload, self.cluster, self.constraints
        for processes in list_worlds(workload, cluster, constraints):
            for layout in iterate_layouts(processes, cluster, constraints):
                for recompute in list_recomputations(workload, constraints):
                    for size in list_micro_batches(workload, processes, constraints):
                        yield build_choice(layout, processes, size, recompute, constraints, cluster)

    def time(self, choice: Choice) -> Timed:
        self.runs += 1
        directory = self.work / str(self.runs)
        return run_steps(
            with_choice(self.recipe, choice), self.machine, self.steps, WARM_UP, directory, cache_directory()
        )

    def find(self, choice: Choice, measured: list[Measured]) -> Measured:
        return next(one for one in measured if one.choice == choice)

    def of(self, choice: Choice, measured: list[Measured]) -> dict[str, Any]:
        return in_json(self.find(choice, measured))


def with_choice(recipe: RecipeSchema, choice: Choice) -> RecipeSchema:
    """The recipe with nothing left open."""
    train = {
        "micro_batch_size": choice.micro_batch_size,
        "activation_checkpointing": choice.activation_checkpointing,
        "mixed_precision": choice.mixed_precision,
    }
    parallel = {key: getattr(choice, key) for key in ("strategy", "num_processes", "reshard_after_forward")}
    values = recipe.model_dump()
    values["train"].update(train)
    values["parallel"].update(parallel)
    values["checkpoint"]["keep_best"] = False
    return type(recipe).model_validate(values)


def in_json(one: Measured) -> dict[str, Any]:
    return {
        "name": one.name,
        "choice": asdict(one.choice),
        "seconds": one.seconds,
        "tokens_per_second": statistics.mean(one.runs[0].tokens) / one.seconds,
        "predicted": one.predicted,
        "runs": [asdict(run) for run in one.runs],
    }


def in_words(result: dict[str, Any]) -> str:
    best = result["best"]
    lines = [f"{result['recipe']}: {len(result['candidates'])} candidates in {result['seconds']:.0f} s"]
    for key, chosen in result["chosen"].items():
        share = 1 - result["regret"][key]
        lines.append(f"  by {key:<11} {chosen['name']:<40} {chosen['tokens_per_second']:8.0f} tokens/s  {share:.0%}")
    lines.append(f"  best           {best['name']:<40} {best['tokens_per_second']:8.0f} tokens/s")
    for one in result["candidates"][1:4]:
        lines.append(f"                 {one['name']:<40} {one['tokens_per_second']:8.0f} tokens/s")
    if result["left_out"]:
        least = min(min(one["predicted"].values()) for one in result["left_out"])
        fastest = min(min(one["predicted"].values()) for one in result["candidates"])
        lines.append(f"  {len(result['left_out'])} not run, predicted {least / fastest:.2f} times as slow or slower")
    lines.append(f"  others used up to {result['others']:.2f} cores")
    return "\n".join(lines)


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for result in results:
        shares = [f"{result['regret'][key]:.1%}" for key in ("datasheet", "calibrated")]
        speed = f"{result['best']['tokens_per_second']:.0f}"
        rows.append((result["recipe"], result["best"]["name"], speed, *shares, str(len(result["candidates"]))))
    print_table(("recipe", "best", "tokens/s", "by datasheet", "calibrated", "run"), rows)
    return {
        f"{key}_{name}": made([result["regret"][key] for result in results])
        for key in ("datasheet", "calibrated")
        for name, made in (("worst", max), ("median", statistics.median))
    }


if __name__ == "__main__":
    main()
