"""Compare what training waits for a checkpoint of SmolLM2-135M on two processes, written in the background and not.

    python bench/checkpoints.py
    python bench/checkpoints.py --single --random-weights --every 300 --output bench/results/checkpoints_gpu.json

Runs with and without the background take turns. The first checkpoint of a run also makes the directory and allocates
the memory of the copy; it counts like the others. The last one is always waited for and left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from gpu_runs import SMOLLM2
from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

ROOT = Path(__file__).parents[1]
RESULTS = results_directory() / "checkpoints.json"
STRATEGIES = ("ddp", "fsdp")
CHECKPOINTS = 3
MEMORY = "memfd:checkpoint"


def recipe(strategy: str, background: bool, run: Path, random_weights: bool, every: int) -> dict[str, Any]:
    """A recipe with short steps; their length changes nothing in a checkpoint."""
    return {
        "task": "sft",
        "model": {"config": SMOLLM2, "tokenizer": "bytes"}
        if random_weights
        else {"name": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "data": {"train": "pydoc", "limit": 400, "max_length": 256},
        "train": {"max_steps": every * (CHECKPOINTS + 1), "global_batch_size": 2, "micro_batch_size": 1},
        "parallel": {"num_processes": 1 if strategy == "single" else 2, "strategy": strategy},
        "checkpoint": {"every": every, "keep_last": 1, "background": background},
        "logging": {"run_directory": str(run), "observers": {"tensorboard": False}},
    }


def measure(strategy: str, background: bool, directory: Path, random_weights: bool, every: int) -> dict[str, Any]:
    """Train; return the seconds of its checkpoints and the bytes of memory that the copies of all ranks take."""
    run, path = directory / "run", directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(strategy, background, run, random_weights, every)))
    path_of_modules = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRAINWRIGHT_QUIET": "1", "PYTHONPATH": path_of_modules}
    command = [sys.executable, "-m", "trainwright", "train", str(path)]
    begun, copies = time.monotonic(), 0
    with (directory / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            copies = max(copies, copied_bytes(process.pid))
            time.sleep(1.0)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{(directory / 'output').read_text()}")
    from trainwright.engine.event_reader import read_events

    events = read_events(run / "events.jsonl")
    written = [event for event in events if event["event"] == "checkpoint"][:CHECKPOINTS]
    state = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*.safetensors"))
    return {
        "strategy": strategy,
        "background": background,
        "blocked_seconds": [event["blocked_seconds"] for event in written],
        "seconds": [event["seconds"] for event in written],
        "step_times": [event["step_time"] for event in events if event["event"] == "step"],
        "copied_bytes": copies,
        "state_bytes": state,
        "wall_seconds": time.monotonic() - begun,
    }


def copied_bytes(command: int) -> int:
    """Return the bytes that the files in memory of the ranks of a command take."""
    files = {}
    with suppress(psutil.Error):  # it has ended
        for process in psutil.Process(command).children(recursive=True):
            for link in Path(f"/proc/{process.pid}/fd").glob("*"):
                with suppress(OSError):
                    if MEMORY in os.readlink(link):
                        found = link.stat()
                        files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="of runs of each strategy")
    parser.add_argument("--every", type=int, default=15, help="steps between checkpoints; 300 on a GPU")
    parser.add_argument("--single", action="store_true", help="one process, such as of one GPU")
    parser.add_argument(
        "--random-weights", action="store_true", help="without the model's own, for machines without it"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    strategies = ("single",) if arguments.single else STRATEGIES
    runs = []
    for pair in range(arguments.pairs):
        for strategy in strategies:
            for background in (True, False) if pair % 2 else (False, True):
                with tempfile.TemporaryDirectory(prefix="checkpoints-") as directory:
                    runs.append(
                        measure(strategy, background, Path(directory), arguments.random_weights, arguments.every)
                    )
                print({key: value for key, value in runs[-1].items() if key != "step_times"}, flush=True)
    rows = []
    for strategy in strategies:
        waited, blocked = (
            statistics.median(
                seconds
                for run in runs
                if (run["strategy"], run["background"]) == (strategy, background)
                for seconds in run["blocked_seconds"]
            )
            for background in (False, True)
        )
        rows.append((strategy, f"{waited:.2f} s", f"{blocked:.3f} s", f"{blocked / waited:.1%}"))
    print_table(("strategy", "waited for", "in the background", "share"), rows)
    write_results(arguments.output, {"machine": describe(sorted(os.sched_getaffinity(0))), "runs": runs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
