"""Measure what a heartbeat costs, with the sums of the ledger and the comparison of ranks.

Steps of one run have one or not, in pairs.

    python bench/heartbeat.py --steps 11000
    python bench/heartbeat.py --model smollm2-135m --steps 800

Two processes, or one with `--strategy single`, train a model: one of 90,000 parameters, whose steps are shorter than
those of any real one, or one of the size of SmolLM2-135M, with random weights. The heartbeat is switched off and on
from step to step; the cost is the median difference of the two steps of a pair, as a share of the median step.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_runs import SMOLLM2
from support.machine import describe, use_cores
from support.results import results_directory
from support.runs import write_results

from trainwright.engine.policies.base import StepPolicy, TrainingContext
from trainwright.utils import heartbeat

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
WARM_UP, PROMISE, SAMPLES = 20, 0.005, 2000
MODELS = {
    "tiny": (),
    "smollm2-135m": (
        f"model.config={json.dumps(SMOLLM2)}",
        "model.dropout=null",
        "data.max_length=64",  # most rows are cut to this, so that the steps of a pair have the same work
        "data.pack_length=null",
        "train.global_batch_size=2",
        "train.micro_batch_size=1",
    ),
}


class Switched(StepPolicy):
    """Keep a heartbeat in one step of every two, in an order that a seed draws for each pair."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._own = heartbeat.find_own_heartbeat()

    def after(self, step: int) -> None:
        """Switch for the next step."""
        heartbeat._own = self._own if has_heartbeat(step + 1) else None


def has_heartbeat(step: int) -> bool:
    """Whether this step has a heartbeat."""
    return bool(step % 2) == bool(random.Random((step + 1) // 2).randrange(2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--output", type=Path, default=results_directory() / "heartbeat.json")
    options = parser.parse_args()
    machine = describe(use_cores(2))
    times = steps(options.steps, options.strategy, MODELS[options.model])
    pairs = [(n, n + 1) for n in range(WARM_UP + 1, max(times), 2) if n + 1 in times]
    extra = [(times[a] - times[b]) * (1 if has_heartbeat(a) else -1) for a, b in pairs]
    step = statistics.median(times[n] for n in times if n > WARM_UP)
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(extra, k=len(extra))) for _ in range(SAMPLES))
    low, cost, high = (s / step for s in (medians[SAMPLES // 40], statistics.median(extra), medians[-SAMPLES // 40]))
    print(f"{len(pairs)} pairs of steps of {step * 1000:.1f} ms: {cost:+.2%} ({low:+.2%} to {high:+.2%})")
    found = {"cost": cost, "low": low, "high": high, "step_seconds": step, "pairs": len(pairs)}
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    found |= {"machine": machine, "strategy": options.strategy}
    write_results(options.output, {"models": {**known.get("models", {}), options.model: found}})
    return 0 if cost <= PROMISE else 1


def steps(count: int, strategy: str, more: Sequence[str]) -> dict[int, float]:
    """The seconds of every step."""
    processes = 1 if strategy == "single" else 2
    with tempfile.TemporaryDirectory(prefix="heartbeat-") as temporary:
        run = Path(temporary) / "run"
        settings = [
            *(
                f"data.train={ROWS}",
                "data.validation=null",
                f"logging.run_directory={run}",
                "logging.observers.tensorboard=false",
            ),
            *(f"train.max_steps={count}", f"parallel.strategy={strategy}", f"parallel.num_processes={processes}"),
            *("checkpoint.every=null", "evaluate.every=null", "evaluate.prompts=[]"),
            "train.step_policies=['heartbeat:Switched']",
            *more,
        ]
        own = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "trainwright", "train", str(RECIPE), *settings]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": own}, check=True)
        events: list[dict[str, Any]] = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        return {event["step"]: event["step_time"] for event in events if event["event"] == "step"}


if __name__ == "__main__":
    sys.exit(main())
