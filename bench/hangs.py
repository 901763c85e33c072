"""Make ranks of real runs hang, and see whether the right rank and phase are named, and how soon.

    python bench/hangs.py --list
    python bench/hangs.py --trials 200
    python bench/hangs.py --kinds gil missing --trials 40

A seed draws the rank, the step and the strategy of every trial. Verdicts are kept as they come, and a bench that was
interrupted goes on with the trials that have none. Exit code 1 if less than 95 % are named right within 15 s.
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
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
# The phase that is to be named; None: whichever the rank has reached.
PHASES = {
    "stop": None,
    "data": "data",
    "forward": "forward",
    "optimizer": "optimizer",
    "collective": "step policies and observers",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "generation": "generation",
    "missing": None,
    "order": None,
    "gil": "data",
    "loop": "metrics",
}
SECONDS, SHARE = 15.0, 0.95
PATIENCE = 180.0


@dataclass(frozen=True)
class Trial:
    """One hang."""

    number: int
    kind: str
    rank: int
    step: int
    strategy: str

    @property
    def name(self) -> str:
        return f"{self.number}:{self.kind}:{self.rank}:{self.step}:{self.strategy}"


def main() -> int:
    options = parse_arguments()
    trials = schedule(options.seed, options.trials, options.kinds)
    if options.list:
        print(*(trial.name for trial in trials), sep="\n")
        return 0
    known = read(options.results)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    left = [trial for trial in trials if trial.name not in known]
    with ThreadPoolExecutor(options.jobs) as pool, options.results.open("a") as file:
        for trial, found in zip(left, pool.map(attempt, left), strict=True):
            known[trial.name] = verdict = {**asdict(trial), **found}
            file.write(json.dumps({"name": trial.name, **verdict}) + "\n")
            file.flush()
            print(f"{trial.name}: {'right' if verdict['right'] else 'WRONG'} after {verdict['seconds']}", flush=True)
    return report([known[trial.name] for trial in trials], options.output)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = results_directory()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=PHASES, default=list(PHASES), help="only hangs of these kinds")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time; most of one is waiting")
    parser.add_argument("--list", action="store_true", help="show the trials and run nothing")
    parser.add_argument("--results", type=Path, default=results / "hangs.jsonl", help="the verdicts, one a line")
    parser.add_argument("--output", type=Path, default=results / "hangs.json", help="the summary")
    return parser.parse_args()


def schedule(seed: int, count: int, kinds: list[str]) -> list[Trial]:
    """The trials of a seed: every kind as often as every other."""
    drawn = random.Random(seed)
    return [
        Trial(
            number,
            kinds[number % len(kinds)],
            drawn.randrange(2),
            3 * drawn.randrange(2, 4),  # a step with an evaluation and a checkpoint, after one of each
            drawn.choice(["ddp", "fsdp"]),
        )
        for number in range(count)
    ]


def read(results: Path) -> dict[str, dict[str, Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def attempt(trial: Trial) -> dict[str, Any]:
    """Run until it is ended as a hang; say whether rank and phase were named, and after which time."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as temporary:
        run, began = Path(temporary) / "run", Path(temporary) / "began"
        settings = [
            *(
                f"data.train={ROWS}",
                "data.validation=8",
                f"logging.run_directory={run}",
                "logging.observers.tensorboard=false",
            ),
            *("train.max_steps=12", "train.global_batch_size=4", "checkpoint.every=3", "evaluate.every=3"),
            *("evaluate.prompts=[a, b]", f"parallel.strategy={trial.strategy}", "parallel.num_processes=2"),
            *("train.step_policies=['tests.support.hanging:Hanging']", "faults.on_hang=stop"),
        ]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HANG": f"{trial.kind}:{trial.rank}:{trial.step}",
            "HANG_FILE": str(began),
        }
        command = [sys.executable, "-m", "trainwright", "train", str(RECIPE), *settings]
        try:
            ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return {"right": False, "seconds": None, "said": "nothing"}
        if not began.exists():
            raise SystemExit(f"{trial.name}: the run ended before it could hang:\n{ended.stderr}")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        faults = [event for event in events if event["event"] == "fault" and event["kind"] == "hang"]
        noticed = faults[0]["time"] if faults else time.time()
        seconds = round(noticed - began.stat().st_mtime, 2)
        # Different collectives would be different again, so such a run is not to be retried.
        expected = 4 if trial.kind in ("missing", "order") else 5
        right = ended.returncode == expected and named(trial, faults, ended.stderr)
        return {"right": right, "seconds": seconds, "said": ended.stderr[:600]}


def named(trial: Trial, faults: list[dict[str, Any]], message: str) -> bool:
    """Whether the rank and the phase are named; of calls in another order, which of two ranks is wrong is not known."""
    if trial.kind == "order":
        return "different collectives" in message and message.count("hanging.py:") >= 2
    phase = PHASES[trial.kind]
    if not faults:
        return trial.kind == "missing" and "different collectives" in message and "hanging.py:" in message
    return faults[0]["rank"] == trial.rank and (phase is None or f"in phase {phase}" in faults[0]["detail"])


def report(verdicts: list[dict[str, Any]], output: Path) -> int:
    rows, kinds = [], {}
    for kind in PHASES:
        of_kind = [verdict for verdict in verdicts if verdict["kind"] == kind]
        if of_kind:
            right = [v for v in of_kind if v["right"] and v["seconds"] <= SECONDS]
            seconds = statistics.median([v["seconds"] for v in of_kind if v["seconds"] is not None] or [float("nan")])
            kinds[kind] = {"trials": len(of_kind), "right": len(right), "median_seconds": seconds}
            rows.append([kind, str(len(of_kind)), str(len(right)), f"{seconds:.1f}"])
    print_table(["Kind", "Trials", f"Right within {SECONDS:.0f} s", "Median seconds"], rows)
    right = sum(kind["right"] for kind in kinds.values())
    write_results(output, {"machine": describe([]), "trials": len(verdicts), "right": right, "kinds": kinds})
    return 0 if right >= SHARE * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
