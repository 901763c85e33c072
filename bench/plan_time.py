"""Predicted step times against measured ones: the same recipes planned by datasheet, by calibration, and run.

    python bench/plan_time.py                     all cases, after a calibration; some ten minutes
    python bench/plan_time.py --only fsdp         cases whose name has it
    python bench/plan_time.py --calibration FILE  one made before

Every case is a recipe in which nothing is left open, run for a few steps by the product's own workers. A datasheet says
little of a machine's true speed, so its predictions are judged by their order, and by their errors after all are
multiplied by one factor; those by calibration as they are. Wants a machine that does nothing else; each run says how
many cores everything else used meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.machine import describe, use_cores
from support.peers import cache_directory
from support.results import results_directory
from support.runs import print_table, write_results
from support.small_recipes import calibrated, small_recipe
from support.timed_runs import Timed, pairwise_order, run_steps, spearman

from trainwright.machine.describe import build_cluster
from trainwright.machine.detect import detect
from trainwright.machine.machine import Machine
from trainwright.machine.measured.calibration import Calibration
from trainwright.planning.facts import build_facts
from trainwright.planning.step_time.rates import Rates
from trainwright.planning.step_time.step import estimate_step_time
from trainwright.planning.workload import Choice
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.process import preload_libraries

RESULTS = results_directory() / "plan_time.json"
WARM_UP = 2

# Name: model, mean length of documents, pack length (None: padded rows), examples per step, overrides.
CASES: dict[str, tuple[str, int, int | None, int, tuple[str, ...]]] = {
    "narrow": ("narrow", 128, 1024, 16, ()),
    "narrow fp32": ("narrow", 128, 1024, 16, ("train.mixed_precision=no",)),
    "narrow long": ("narrow", 1000, 1024, 4, ()),
    "narrow padded": ("narrow", 128, None, 16, ("train.micro_batch_size=8",)),
    "narrow full": ("narrow", 128, 1024, 16, ("train.activation_checkpointing=full",)),
    "narrow small micro-batches": ("narrow", 128, 256, 16, ()),
    "narrow ddp": ("narrow", 128, 1024, 32, ("parallel.strategy=ddp",)),
    "narrow fsdp": ("narrow", 128, 1024, 32, ("parallel.strategy=fsdp",)),
    "wide": ("wide", 128, 1024, 8, ()),
    "wide fp32": ("wide", 128, 1024, 8, ("train.mixed_precision=no",)),
    "wide selective": ("wide", 128, 1024, 8, ("train.activation_checkpointing=selective",)),
    "wide every second": ("wide", 128, 1024, 8, ("train.activation_checkpointing=2",)),
    "wide long": ("wide", 1000, 2048, 2, ()),
    "wide ddp": ("wide", 128, 512, 8, ("parallel.strategy=ddp",)),
    "wide ddp fp32": ("wide", 128, 512, 8, ("parallel.strategy=ddp", "train.mixed_precision=no")),
    "wide fsdp": ("wide", 128, 512, 8, ("parallel.strategy=fsdp",)),
    "wide fsdp kept": ("wide", 128, 512, 16, ("parallel.strategy=fsdp", "parallel.reshard_after_forward=false")),
    "wide fsdp full": ("wide", 128, 512, 8, ("parallel.strategy=fsdp", "train.activation_checkpointing=full")),
    "words": ("words", 128, 1024, 8, ()),
    "words ddp": ("words", 128, 512, 8, ("parallel.strategy=ddp",)),
    "words fsdp fp32": ("words", 128, 512, 8, ("parallel.strategy=fsdp", "train.mixed_precision=no")),
    "gpt2": ("gpt2", 256, 1024, 8, ()),
    "gpt2 fp32": ("gpt2", 256, 1024, 8, ("train.mixed_precision=no",)),
    "gpt2 padded": ("gpt2", 256, None, 8, ("train.micro_batch_size=4",)),
    "wide zero1": ("wide", 128, 512, 8, ("parallel.strategy=zero1",)),
    "wide zero2 fp32": ("wide", 128, 512, 8, ("parallel.strategy=zero2", "train.mixed_precision=no")),
    "wide zero3": ("wide", 128, 512, 8, ("parallel.strategy=zero3",)),
}


def main() -> None:
    arguments = parse_arguments()
    machine, description = detect(), describe(use_cores(detect().cpu_cores))
    preload_libraries()
    calibration = calibrated(arguments.calibration, machine)
    rows = []
    with tempfile.TemporaryDirectory(prefix="plan-time-") as temporary:
        work = Path(temporary)
        for number, name in enumerate(n for n in CASES if arguments.only in n and runs_here(n)):
            recipe = recipe_of(name, work)
            timed = run_steps(recipe, machine, arguments.steps, WARM_UP, work / str(number), cache_directory())
            rows.append(judged(name, recipe, machine, calibration, timed))
            print(in_words(rows[-1]), flush=True)
    summary = summarize(rows)
    write_results(arguments.output, {"machine": description, "summary": summary, "cases": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help=f"steps of each, {WARM_UP} of them warm-up (8)")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--calibration", type=Path, help="a file; made anew and written there if it does not exist")
    parser.add_argument("--output", type=Path, default=RESULTS, help="file of results")
    return parser.parse_args()


def runs_here(name: str) -> bool:
    from importlib.util import find_spec

    return "zero" not in name or find_spec("deepspeed") is not None


def recipe_of(name: str, work: Path) -> RecipeSchema:
    """The case's recipe, nothing left open."""
    model, length, pack, examples, overrides = CASES[name]
    asked = dict(text.split("=") for text in overrides)
    values = {
        "train.micro_batch_size": "1",
        "train.mixed_precision": "bf16",
        "train.activation_checkpointing": "none",
        "parallel.strategy": "single",
        "parallel.num_processes": "2" if "parallel.strategy" in asked else "1",
        **asked,
    }
    return small_recipe(model, length, pack, examples, work, [f"{key}={value}" for key, value in values.items()])


def judged(name: str, recipe: RecipeSchema, machine: Machine, calibration: Calibration, timed: Timed) -> dict[str, Any]:
    """What was measured of a case beside both predictions."""
    cluster, workload = build_cluster(machine), build_facts(recipe).workload
    choice = choice_of(recipe, machine, timed.accumulation)
    by_datasheet = estimate_step_time(workload, choice, cluster, Rates(cluster))
    by_calibration = estimate_step_time(workload, choice, cluster, Rates(cluster, calibration))
    tokens = statistics.mean(timed.tokens) / workload.tokens
    return {
        "name": name,
        "measured": timed.seconds,
        "datasheet": by_datasheet.seconds,
        "calibrated": by_calibration.seconds,
        "tokens_of_planned": tokens,
        "parts": dict(by_calibration.parts),
        **asdict(timed),
    }


def choice_of(recipe: RecipeSchema, machine: Machine, passes: int) -> Choice:
    """What a recipe with nothing left open stands for, with the micro-batches per process that it came to."""
    train, parallel = recipe.train, recipe.parallel
    processes: Any = parallel.num_processes
    options: dict[str, Any] = {"strategy": parallel.strategy, "mixed_precision": train.mixed_precision}
    return Choice(
        num_processes=processes,
        micro_batch_size=int(train.micro_batch_size),
        gradient_accumulation_steps=passes,
        activation_checkpointing=train.activation_checkpointing,  # type: ignore[arg-type]
        replicate_size=parallel.replicate_size,
        reshard_after_forward=parallel.reshard_after_forward,
        compile=train.compile is True,
        threads=max(1, machine.cpu_cores // processes),
        **options,
    )


def in_words(row: dict[str, Any]) -> str:
    errors = "".join(f"  {key} {row[key] / row['measured'] - 1:+6.1%}" for key in ("datasheet", "calibrated"))
    spread = (max(row["times"]) - min(row["times"])) / row["measured"]
    return (
        f"{row['name']:<28} {row['measured'] * 1e3:8.0f} ms{errors}  (spread {spread:.0%}, others {row['others']:.2f} "
        f"cores, tokens {row['tokens_of_planned']:.2f})"
    )


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    measured = [row["measured"] for row in rows]
    summary: dict[str, float] = {}
    for key in ("datasheet", "calibrated"):
        predicted = [row[key] for row in rows]
        errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
        # In the right proportions, whatever the machine's speed: all predictions times one factor.
        factor = statistics.median(m / p for p, m in zip(predicted, measured, strict=True))
        scaled = [abs(factor * p / m - 1) for p, m in zip(predicted, measured, strict=True)]
        summary |= {
            f"{key}_factor": factor,
            f"{key}_median_error_scaled": statistics.median(scaled),
            f"{key}_median_error": statistics.median(errors),
            f"{key}_worst_error": errors[-1],
            f"{key}_spearman": spearman(predicted, measured) if len(rows) > 2 else 1.0,
            f"{key}_pairs_in_order": pairwise_order(predicted, measured),
        }
    print_table(("", "value"), [(key, f"{value:.3f}") for key, value in summary.items()])
    return summary


if __name__ == "__main__":
    main()
