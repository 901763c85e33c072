"""From nothing to an agent that learns in its context: seconds of collection, training and trial, and what it reaches.

    python bench/in_context_learning.py [RECIPE] [SECTION.KEY=VALUE]... [--seeds 0,1,2] [--work DIRECTORY]

Histories are collected once, with the recipe's own source, unless they are in the directory already; then the recipe
is trained and tried with each seed (`train.seed`; the tasks held back stay the same). A line is one seed: mean return
of the first episode and the last ones, with 95 % intervals, beside the source, random actions and the optimum.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "algorithm_distillation" / "darkroom.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="*", metavar="RECIPE or SECTION.KEY=VALUE")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, help="where everything goes; a new temporary directory by default")
    asked = parser.parse_args()
    recipes = [word for word in asked.given if "=" not in word] or [str(RECIPE)]
    overrides = [word for word in asked.given if "=" in word]
    work = asked.work or Path(tempfile.mkdtemp(prefix="in-context-"))
    work.mkdir(parents=True, exist_ok=True)
    common = [recipes[0], f"algorithm_distillation.histories={work / 'histories.h5'}", *overrides]
    collected = seconds("collect", *common)
    print(json.dumps({"collected_in": round(collected, 1)}), flush=True)
    for seed in asked.seeds.split(","):
        run, tried = work / f"seed-{seed}", work / f"tried-{seed}"
        trained = seconds("train", *common, f"train.seed={seed}", f"logging.run_directory={run}")
        evaluated = seconds("eval", str(run), "--out", str(tried))
        metrics = json.loads((tried / "metrics.json").read_text())
        found = {
            name: metrics[name] for name in ("sampled", "greedy", "random", "source", "optimum") if name in metrics
        }
        times = {"trained_in": round(trained, 1), "tried_in": round(evaluated, 1)}
        print(json.dumps({"seed": int(seed), **times, **found}), flush=True)


def seconds(*arguments: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "trainwright", *arguments], check=True, stdout=sys.stderr)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
