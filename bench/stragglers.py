"""Slow one of two ranks down, and see whether it is named, how soon, and how well the gain is predicted.

    python bench/stragglers.py --trials 20

A trial stops one worker of a real run for a part of every tenth of a second, from a step on; another runs it without.
The predicted gain, as a part of the step time, is compared with that of the same run without the stops: with the steps
just before and just after them, in equal numbers, as a shared host's speed changes within a minute. Exit code 1 if a
slow rank is not named within 20 steps, or a healthy one is.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

from trainwright.engine.event_reader import read_log
from trainwright.utils.heartbeat import Beat, build_heartbeat_path, create_heartbeat_directory, read

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
OUTPUT = results_directory() / "stragglers.json"
STRATEGIES = ("ddp", "fsdp")
PERIOD = 0.1
BEGIN, SLOW, AFTER = 40, 30, 24  # steps before, while, and after a rank is slow
# Steps of a quarter of a second: 20 of those of some 40 ms that the recipe has are over before what else a machine or
# its host does evens out among the processors.
BATCH = 64
WITHIN, AROUND = 20, 20  # steps: until the rank is named; before and after, to compare with


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="with a slow rank, and again as many without")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    trials = []
    for number in range(options.trials):
        strategy, rank, share = STRATEGIES[number % 2], draw.randrange(2), draw.choice((0.3, 0.5, 0.7))
        for slow in (share, None):
            trials.append(trial(strategy, rank, slow))
            print(trials[-1], flush=True)
    slowed, healthy = ([each for each in trials if (each["share"] is not None) is slow] for slow in (True, False))
    right = sum(each["named"] == each["rank"] and each["steps"] <= WITHIN for each in slowed)
    wrong = sum(each["named"] is not None for each in healthy)
    errors = [abs(each["predicted"] / each["gain"] - 1) for each in slowed if each["named"] is not None]
    summary = {
        "slowed": len(slowed),
        "named_within_20_steps": right,
        "healthy": len(healthy),
        "healthy_named": wrong,
        "steps": statistics.median(each["steps"] for each in slowed if each["named"] is not None),
        "gain_error": statistics.median(errors),
        "gain_error_most": max(errors),
    }
    print_table(("", "value"), [(name, str(value)) for name, value in summary.items()])
    write_results(OUTPUT, {"machine": describe(sorted(os.sched_getaffinity(0))), "summary": summary, "trials": trials})
    return 0 if right == len(slowed) and not wrong else 1


def trial(strategy: str, rank: int, share: float | None) -> dict[str, Any]:
    """Run once; return the rank that was named, after how many steps, and the step time without it in two ways."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        keys = {
            "train.max_steps": BEGIN + SLOW + AFTER,
            "train.global_batch_size": BATCH,
            "parallel.strategy": strategy,
            "parallel.num_processes": 2,
            "logging.run_directory": run,
            "evaluate.every": "null",
            "faults.on_hang": "warn",
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (Path(directory) / "log").open("w") as log:
            command = [
                sys.executable,
                "-m",
                "trainwright",
                "train",
                str(RECIPE),
                *(f"{k}={v}" for k, v in keys.items()),
            ]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            if share is not None:
                reached(process, run, rank, BEGIN)
                first = step_of(run, rank)
                with slowed(process, run, rank, share):
                    reached(process, run, rank, BEGIN + SLOW)
                last = step_of(run, rank)
            if process.wait() != 0:
                raise SystemExit((Path(directory) / "log").read_text())
        events = read_log(run / "events.jsonl").everything
        notices = [event for event in events if event.get("kind") == "straggler"]
        found: dict[str, Any] = {"strategy": strategy, "rank": rank, "share": share, "named": None}
        if notices:
            found |= {"named": notices[0]["rank"], "phase": notices[0]["phase"], "why": notices[0]["why"]}
        if share is not None:
            times = {event["step"]: event["step_time"] for event in events if event["event"] == "step"}
            during = statistics.fmean(times[step] for step in range(first + 2, last))
            before = statistics.fmean(times[step] for step in range(first - AROUND, first))
            after = statistics.fmean(times[step] for step in range(last + 3, last + 3 + AROUND))
            found |= {"before": before, "during": during, "after": after, "gain": 1 - (before + after) / (2 * during)}
            if notices:
                found |= {"steps": notices[0]["step"] - first, "predicted": notices[0]["gain"]}
        return found


def beat_of(run: Path, rank: int) -> Beat | None:
    directory = create_heartbeat_directory(run)
    return None if directory is None else read(build_heartbeat_path(directory, rank))


def step_of(run: Path, rank: int) -> int:
    beat = beat_of(run, rank)
    return -1 if beat is None else beat.step


def reached(process: subprocess.Popen[bytes], run: Path, rank: int, step: int) -> None:
    while process.poll() is None and step_of(run, rank) < step:
        time.sleep(0.05)  # rarely, as it takes time of the ranks' cores


@contextmanager
def slowed(process: subprocess.Popen[bytes], run: Path, rank: int, share: float) -> Iterator[None]:
    """Stop the worker of a rank for a share of every period."""
    beat, done = beat_of(run, rank), threading.Event()
    assert beat is not None, "it trains"

    def stop_and_continue() -> None:
        while not done.is_set():
            with suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGSTOP)
                time.sleep(PERIOD * share)
                os.kill(beat.pid, signal.SIGCONT)
            time.sleep(PERIOD * (1 - share))

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
