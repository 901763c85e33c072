"""How right a plan is about memory: peaks of live tensors, predicted and measured, over many small runs.

    python bench/plan_accuracy.py                     all cases, some twenty minutes on two cores
    python bench/plan_accuracy.py --only fsdp --only gemma2
    python bench/plan_accuracy.py --seed 7            other cases, drawn anew
    python bench/plan_accuracy.py --seconds 240       as many as begin in that time; the next call goes on
    python bench/plan_accuracy.py --predict           no runs: what was measured before against what is predicted now

Every case is a run of the product's own workers, three steps long. On a CPU the peak is counted from every allocation
that torch makes, by rank; on a GPU it is torch's own count (max_memory_allocated), with what its allocator reserved
beside it. Cases cover model families, sizes, lengths, micro-batches, accumulation, packing, strategies, recomputation,
precision and adapters; each draws its factors from a seeded generator, the strategies and families in turn. For
each, there are the figures of `accelerate estimate-memory` and of DeepSpeed's estimators for the same model.

The file of results has every measurement with the machine's description. A case that is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import plan_runs
from support.estimators import estimates
from support.machine import describe, use_cores
from support.plan_cases import FAMILIES, Bf16Case, Case, draw, predict
from support.results import results_directory

from trainwright.errors import TrainwrightError
from trainwright.machine.detect import detect
from trainwright.machine.machine import Machine

RESULTS = results_directory()
CASES = 104


def measure(case: Case, work: Path) -> dict[str, Any]:
    """What the run of ``case`` took, by rank."""
    found = plan_runs.run(case.recipe(work), work / case.id, work / "cache")
    return {"id": case.id, "case": case.name, **found}


def judged(case: Case, found: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Measured, predicted and estimated bytes of the fullest rank; ``error``: as a part of what was measured."""
    measured = max(max(rank["phases"].values()) for rank in found["ranks"])
    predicted = predict(case, found, machine)
    others = estimates(case)
    return {
        **found,
        "strategy": case.strategy,
        "kind": case.kind,
        "family": case.config["model_type"],
        "measured": measured,
        "reserved": max(rank["reserved"] for rank in found["ranks"]),
        "predicted": predicted.allocated,
        "predicted_phases": dict(predicted.phases),
        "error": predicted.allocated / measured - 1,
        "others": {name: {"bytes": size, "error": size / measured - 1} for name, size in others.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="which cases are drawn (0)")
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many ({CASES})")
    parser.add_argument("--family", action="append", help="of these alone; stablelm and olmo are ones that are traced")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases with this in their name")
    parser.add_argument("--bf16-weights", action="store_true", help="all trained in full, without master weights")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--predict", action="store_true", help="run nothing; judge what the file of results has")
    parser.add_argument("--output", type=Path, help="file of results (results/plan_accuracy_DEVICE_SEED.json)")
    arguments = parser.parse_args()
    begun, machine = time.monotonic(), detect()
    device = "gpu" if machine.gpus else "cpu"
    output = arguments.output or RESULTS / f"plan_accuracy_{device}_{arguments.seed}.json"
    before = json.loads(output.read_text()) if output.exists() else {"cases": [], "machine": None}
    known = {result["id"]: result for result in before["cases"]}
    described = before["machine"] if arguments.predict else describe(use_cores(2))
    cases = draw(arguments.seed, arguments.cases, machine, arguments.family or FAMILIES)
    if arguments.bf16_weights:
        cases = [Bf16Case.of(case) for case in cases if not case.strategy.startswith("zero")]
    chosen = [case for case in cases if all(word in case.name for word in arguments.only)]
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as work:
        for case in chosen:
            found = known.get(case.id)
            if found is None and not arguments.predict and time.monotonic() - begun < arguments.seconds:
                try:
                    found = measure(case, Path(work))
                except (SystemExit, TrainwrightError, ValueError) as error:  # what the model itself does not run
                    print(f"   did not run   {case.name}: {str(error).splitlines()[0][:90]}", flush=True)
            if found is None:
                continue
            results[case.id] = known[case.id] = judged(case, found, machine)
            error, measured = results[case.id]["error"], results[case.id]["measured"]
            print(f"{error:+7.1%}  {measured / 2**20:8.1f} MiB  {case.name}", flush=True)
            kept = [known[case.id] for case in cases if case.id in known]
            output.write_text(
                json.dumps({"machine": described, "seed": arguments.seed, "cases": kept}, indent=1) + "\n"
            )
    report(list(results.values()))
    print(f"All numbers: {output}")


def report(results: list[dict[str, Any]]) -> None:
    """Median, 95th percentile, and how many were predicted too small: of all, and of each sort."""
    if not results:
        return
    print(f"\n{'':24}{'cases':>6}{'median':>8}{'95 %':>8}{'worst':>8}{'under 3 %':>11}")
    _line("all (3, 5 and 1 % wanted)", [result["error"] for result in results])
    sorts: list[Callable[[dict[str, Any]], str]] = [lambda r: r["strategy"], lambda r: r["kind"], lambda r: r["family"]]
    for sort in sorts:
        for name in sorted({sort(result) for result in results}):
            _line(f"  {name}", [result["error"] for result in results if sort(result) == name])
    for tool, title in (("accelerate", "accelerate estimate-memory"), ("deepspeed", "DeepSpeed's estimators")):
        _line(title, [result["others"][tool]["error"] for result in results if tool in result["others"]])


def _line(title: str, errors: list[float]) -> None:
    if not errors:
        return
    sizes = sorted(abs(error) for error in errors)
    under = sum(error < -0.03 for error in errors) / len(errors)
    rank = max(0, -(-95 * len(sizes) // 100) - 1)
    print(f"{title:26}{len(sizes):4}{statistics.median(sizes):8.1%}{sizes[rank]:8.1%}{sizes[-1]:8.1%}{under:11.1%}")


if __name__ == "__main__":
    main()
