"""From nothing to an agent that learns in its context: seconds of collection, training and trial, and what it reaches.

    python bench/in_context_learning.py [RECIPE] [SECTION.KEY=VALUE]... [--seeds 0,1,2] [--work DIRECTORY]

Histories are collected once, with the recipe's own source, unless they are in the directory already; then the recipe
is trained and tried with each seed (`train.seed`; the tasks held out stay the same). A line is one seed: mean return
of the first episode and the last ones, with 95 % intervals, beside the source, random actions and the optimum. All of
it goes into a file of results by the name of the recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from support.machine import describe, use_cores
from support.results import results_directory
from support.runs import write_results

import trainwright as tw

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "algorithm_distillation" / "darkroom.yaml"
RESULTS = results_directory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="*", metavar="RECIPE or SECTION.KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, help="where everything goes; a new temporary directory by default")
    parser.add_argument("--cores", type=int, default=2, help="cores that all of it is kept to (2)")
    parser.add_argument("--output", type=Path, help="file of results (results/in_context_learning_<recipe>.json)")
    asked = parser.parse_args()
    recipes = [word for word in asked.given if "=" not in word] or [str(RECIPE)]
    overrides = [word for word in asked.given if "=" in word]
    output = asked.output or RESULTS / f"in_context_learning_{Path(recipes[0]).stem}.json"
    machine = describe(use_cores(asked.cores))
    work = asked.work or Path(tempfile.mkdtemp(prefix="in-context-"))
    work.mkdir(parents=True, exist_ok=True)
    common = [recipes[0], f"algorithm_distillation.histories={work / 'histories.h5'}", *overrides]
    were_there = (work / "histories.h5").exists()
    collected = round(seconds(tw.collect, *common), 1)
    print(json.dumps({"collected_in": collected, "were_there": were_there}), flush=True)
    rows = []
    for seed in asked.seeds.split(","):
        run, tried = work / f"seed-{seed}", work / f"tried-{seed}"
        trained = seconds(tw.train, *common, f"train.seed={seed}", f"logging.run_directory={run}")
        evaluated = seconds(tw.evaluate, run, out=tried)
        metrics = json.loads((tried / "metrics.json").read_text())
        found = {
            name: metrics[name] for name in ("sampled", "greedy", "random", "source", "optimum") if name in metrics
        }
        times = {"trained_in": round(trained, 1), "tried_in": round(evaluated, 1)}
        rows.append({"seed": int(seed), **times, **found})
        print(json.dumps(rows[-1]), flush=True)
    asked_for = {"recipe": Path(recipes[0]).name, "overrides": overrides}
    collection = {"collected_in": collected, "histories_were_there": were_there}
    write_results(output, {"machine": machine, **asked_for, **collection, "seeds": rows})


def seconds(function: Callable[..., Any], *arguments: Any, **named: Any) -> float:
    """How long a call takes. What it shows goes to standard error, as lines of results go to standard output."""
    begun = time.perf_counter()
    with redirect_stdout(sys.stderr):
        function(*arguments, **named, progress=True)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
