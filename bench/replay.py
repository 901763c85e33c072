"""Flip one bit of a weight or an activation on one rank of real runs, and see whether it is found and its rank named.

    python bench/replay.py --trials 100
    python bench/replay.py --cost           what a check takes, by runs with and without checks in turn

A seed draws the strategy, the rank, the step, the place and the mantissa bit of every trial. A weight is flipped at any
step; an activation in the pass that the next check repeats. Each run is then compared with the undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
RESULTS = results_directory() / "replay.json"
EVERY, STEPS = 4, 16
DEFAULT_EVERY = 200
MANTISSA_BITS = 23
SETTINGS = (
    *(f"data.train={ROWS}", f"train.max_steps={STEPS}", "train.mixed_precision=no", "parallel.num_processes=2"),
    *("checkpoint.every=2", "evaluate.every=null", "logging.observers.tensorboard=false"),
)


@dataclass(frozen=True)
class Trial:
    """One flipped bit."""

    what: str
    strategy: str
    where: dict[str, Any]

    @classmethod
    def draw(cls, seed: int) -> Trial:
        chance = random.Random(seed)
        what = chance.choice(["FlippedWeight", "Activation"])
        # Sharded weights have no copy that they could be compared with.
        strategy = "ddp" if what == "FlippedWeight" else chance.choice(["ddp", "fsdp"])
        # A check that found nothing comes first, so that there is a checkpoint to go back to.
        step = chance.randint(EVERY + 1, 2 * EVERY - 1) if what == "FlippedWeight" else 2 * EVERY
        drawn = {"rank": chance.randrange(2), "step": step, "place": chance.random()}
        return cls(what, strategy, {**drawn, "bit": chance.randrange(MANTISSA_BITS), "pass": chance.randrange(2)})


def train(run: Path, *overrides: str, where: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Train; return the events that count."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRAINWRIGHT_QUIET": "1",
        "TRAINWRIGHT_FAULT": json.dumps(where),
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "trainwright", "train", str(RECIPE), *SETTINGS, f"logging.run_directory={run}"]
    done = subprocess.run([*command, *overrides], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    from trainwright.engine.event_reader import read_events

    return read_events(run / "events.jsonl")


def losses(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def tried(trial: Trial, directory: Path, expected: dict[int, float]) -> dict[str, Any]:
    overrides = (f"faults.replay_every={EVERY}", f"parallel.strategy={trial.strategy}")
    policy = f"train.step_policies=['trainwright.faults.drills.planted:{trial.what}']"
    events = train(directory, *overrides, policy, where=trial.where)
    faults = [event for event in events if event["event"] == "fault"]
    named = faults[-1]["rank"] if faults else None
    same = losses(events) == expected
    return {**asdict(trial), "found": bool(faults), "named": named == trial.where["rank"], "same": same}


def cost(directory: Path, pairs: int) -> dict[str, Any]:
    """The time of a step with a check in each over one without, in turn; a check every 200 steps costs that / 200."""
    found: dict[str, list[float]] = {}
    for strategy in ("ddp", "fsdp"):
        shares = []
        for pair in range(pairs):
            times = {}
            for every in ("1", "null") if pair % 2 else ("null", "1"):
                run = directory / f"{strategy}-{pair}-{every}"
                settings = (f"parallel.strategy={strategy}", "train.max_steps=60", "checkpoint.every=null")
                events = train(run, f"faults.replay_every={every}", *settings)
                steps = [event["step_time"] for event in events if event["event"] == "step"]
                times[every] = statistics.median(steps[10:])
            shares.append((times["1"] / times["null"] - 1) / DEFAULT_EVERY)
        found[strategy] = shares
    return {"every": DEFAULT_EVERY, "shares": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="only measure the cost of a check")
    parser.add_argument("--pairs", type=int, default=4, help="of runs, for the cost")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    kept: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    kept["machine"] = describe(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        directory = Path(temporary)
        if arguments.cost:
            kept["cost"] = cost(directory, arguments.pairs)
            for strategy, shares in kept["cost"]["shares"].items():
                print(f"{strategy}: {statistics.median(shares):.2%} of a step with a check every {DEFAULT_EVERY}")
            write_results(arguments.output, kept)
            return 0
        expected = {
            strategy: losses(train(directory / strategy, f"parallel.strategy={strategy}", "faults.replay_every=null"))
            for strategy in ("ddp", "fsdp")
        }
        results = []
        for number in range(arguments.trials):
            trial = Trial.draw(arguments.seed * 100_000 + number)
            results.append(tried(trial, directory / f"trial-{number}", expected[trial.strategy]))
            print(json.dumps(results[-1]), flush=True)
    kept["trials"] = results
    counts = Counter((each["what"], each["strategy"]) for each in results)
    print_table(
        ("bit of", "strategy", "trials", "found", "rank named", "same losses"),
        [
            (what, strategy, str(count), *(_count(results, what, strategy, key) for key in ("found", "named", "same")))
            for (what, strategy), count in sorted(counts.items())
        ],
    )
    write_results(arguments.output, kept)
    return 0 if all(each["found"] and each["named"] and each["same"] for each in results) else 1


def _count(results: list[dict[str, Any]], what: str, strategy: str, key: str) -> str:
    return str(sum(each[key] for each in results if (each["what"], each["strategy"]) == (what, strategy)))


if __name__ == "__main__":
    raise SystemExit(main())
