"""How right a plan is about the memory of processes on a CPU, as every run reports it at its end.

    python bench/plan_memory.py                  cases of seed 13, which the plan's interval on CPUs is made from
    python bench/plan_memory.py --seed 14        others; seeds up to 12 are those that the model of memory was fitted to
    python bench/plan_memory.py --seconds 600    as many as begin in that time; the next call goes on
    python bench/plan_memory.py --predict        no runs: what was measured before against what is predicted now

Every case is `trainwright train` of the cases of plan_accuracy.py, four steps long, half of them with evaluations and
written answers. Measured is the largest resident memory of a process up to the end of its export, as in the run's last
event; predicted is what its plan said. plan_accuracy.py counts tensors alone: here are the interpreter, the libraries,
the buffers of the processes' exchange, and what the allocator keeps. `python bench/plan_published.py --write` makes
the interval of the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from support.machine import describe, use_cores
from support.plan_cases import Case, draw
from support.results import results_directory
from support.trainwright_side import COMMAND

import trainwright as tw
from trainwright.machine.detect import detect
from trainwright.planning.errors import SHARE, Interval, estimate_interval

RESULTS = results_directory()
STEPS = 4
CASES = 48
MAX_TOKENS = {"no": 4_096, "bf16": 1_024}  # of a step; cases with more are left out, which would take minutes each
EVALUATED = {"every": 2, "prompts": ["What is a list?"], "max_new_tokens": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=13, help="which cases are drawn (13)")
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many ({CASES})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--predict", action="store_true", help="run nothing; plan what the file of results has")
    options = parser.parse_args()
    started, output = time.monotonic(), RESULTS / f"plan_memory_cpu_{options.seed}.json"
    before = json.loads(output.read_text()) if output.exists() else {"cases": []}
    results = before["cases"]
    measured = {result["id"]: result for result in results}
    machine = before["machine"] if options.predict else describe(use_cores(2))
    with tempfile.TemporaryDirectory(prefix="plan-memory-") as work:
        for number, case in enumerate(draw(options.seed, options.list_cases, detect())):
            if options.predict:
                if case.id in measured:
                    measured[case.id] |= planned(case, Path(work), evaluates=number % 2 == 1)
                continue
            if (
                case.id in measured
                or time.monotonic() - started > options.seconds
                or tokens(case) > MAX_TOKENS[case.precision]
            ):
                continue
            result = measure(case, Path(work), evaluates=number % 2 == 1)
            if result is None:
                print(f"   did not run  {case.name}", flush=True)
                continue
            results.append(result)
            ratio = result["measured"] / result["predicted"]
            print(f"{ratio - 1:+7.1%}  {result['measured'] / 2**20:8.1f} MiB  {case.name}", flush=True)
            _write(output, machine, options.seed, results)
    if options.predict:
        _write(output, machine, options.seed, results)
    report(results)
    print(f"All numbers: {output}")


def _write(output: Path, machine: Any, seed: int, results: list[dict[str, Any]]) -> None:
    output.write_text(json.dumps({"machine": machine, "seed": seed, "cases": results}, indent=1) + "\n")


def tokens(case: Case) -> int:
    """Return the tokens of a step, with padding."""
    return case.micro_batch * case.accumulation * case.processes * (case.pack or max(case.documents))


def measure(case: Case, work: Path, *, evaluates: bool) -> dict[str, Any] | None:
    """Return the bytes that a run took and was planned to take; None if the model does not run so."""
    file, run = recipe_of(case, work, evaluates=evaluates), work / case.id
    if subprocess.run([*COMMAND, "train", str(file)], check=False, capture_output=True).returncode:
        return None
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    return {
        "id": case.id,
        "case": f"{case.name}{', evaluated' if evaluates else ''}",
        "measured": next(event for event in events if event["event"] == "finish")["measured"]["memory_bytes"],
        **_figures(start["predicted"]),
    }


def recipe_of(case: Case, work: Path, *, evaluates: bool) -> Path:
    """Write the recipe of a run and return its file."""
    recipe = case.recipe(work)
    recipe["train"]["max_steps"] = STEPS
    if evaluates:
        recipe["data"]["validation"] = recipe["data"]["train"]
        recipe["evaluate"] = EVALUATED
    recipe["logging"] = {"run_directory": str(work / case.id), "observers": {"tensorboard": False}}
    file = work / f"{case.id}.json"  # JSON is YAML
    file.write_text(json.dumps(recipe))
    return file


def planned(case: Case, work: Path, *, evaluates: bool) -> dict[str, Any]:
    """Return what the plan of a run says now."""
    return _figures(tw.plan(recipe_of(case, work, evaluates=evaluates)).predicted)


def _figures(predicted: dict[str, float]) -> dict[str, Any]:
    return {
        "predicted": predicted["memory_bytes"],
        "interval": [predicted["memory_low"], predicted["memory_high"]],
    }


def report(results: list[dict[str, Any]]) -> None:
    """Print the errors, the interval of these runs, and how many lie in the interval that their plans gave."""
    ratios = [result["measured"] / result["predicted"] for result in results]
    interval = estimate_interval(ratios)
    if interval is None:
        return
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    inside = sum(_lies_in(result) for result in results) / len(results)
    print(f"\n{len(results)} runs: median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")
    print(f"in the plan's interval: {inside:.0%} ({SHARE:.0%} wanted); of these runs it is {_words(interval)}")


def _lies_in(result: dict[str, Any]) -> bool:
    low, high = result["interval"]
    return bool(low <= result["measured"] / result["predicted"] <= high)


def _words(interval: Interval) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}"


if __name__ == "__main__":
    main()
