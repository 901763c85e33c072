"""How long `trainwright plan` takes to answer, from the command to its end: by the clock, and in CPU time.

    python bench/plan_speed.py

CPU time depends less on what else the machine does than the clock does. Python's bytecode is cached, as where the
package is installed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results
from support.trainwright_side import COMMAND

RESULTS = results_directory() / "plan_speed.json"
RECIPES = Path(__file__).parents[1] / "recipes" / "sft"
ROUNDS = 7
LLAMA = ["--model", "meta-llama/Llama-3.1-8B", "--sequence-length", "8192"]
# What is planned, and the most seconds that it may take.
PLANS: dict[str, tuple[list[str], float]] = {
    "Llama-3.1-8B on 8xH100": ([*LLAMA, "--global-batch-size", "64", "--on", "8xH100"], 0.5),
    "Llama-3.1-8B on 1,024 H100": ([*LLAMA, "--global-batch-size", "1024", "--on", "128x8xH100"], 3.0),
    "a recipe on 8xH100": ([str(RECIPES / "distributed.yaml"), "--on", "8xH100"], 0.5),
    "what does not fit": (["--model", "google/gemma-2-27b", "--global-batch-size", "32", "--on", "2xRTX4090"], 3.0),
}


def main() -> None:
    results = {}
    with TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        for name, (arguments, most) in PLANS.items():
            command = [*COMMAND, "plan", *arguments]
            runs = [timed(command, environment) for _ in range(ROUNDS + 1)][1:]  # the first fills caches
            walls, cpus = zip(*runs, strict=True)
            results[name] = {"wall": walls, "cpu": cpus, "most": most}
    rows = [
        (name, f"{statistics.median(found['wall']):.2f}", f"{statistics.median(found['cpu']):.2f}", f"{found['most']}")
        for name, found in results.items()
    ]
    print_table(("plan", "seconds", "CPU seconds", "at most"), rows)
    write_results(RESULTS, {"machine": describe(sorted(os.sched_getaffinity(0))), "plans": results})


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds by the clock and of CPU time. A plan that does not fit ends with 3."""
    # The command and not `tw.plan`: the start of the process is part of the wait.
    begun, before = time.perf_counter(), os.times()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False)
    after = os.times()
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return time.perf_counter() - begun, cpu


if __name__ == "__main__":
    main()
