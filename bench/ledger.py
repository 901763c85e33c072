"""Compare the ledger of real runs with clocks that are not its own.

    python bench/ledger.py
    python bench/ledger.py --only tiny-fsdp quickstart

Each case is trained twice. In the first run, this bench measures from outside how long the process of every rank
exists, and compares that with what the ledger says of it: the share that has a category, the share of "other", and the
share that is missing. In the second, ``train.profile`` records every step, and the seconds of the phases of the steps
in torch.profiler's trace are compared with those that the ledger has after the last of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from support.machine import describe, use_cores
from support.results import results_directory
from support.runs import print_table, write_results

from trainwright.engine.policies.base import StepPolicy, TrainingContext
from trainwright.machine.usage import compute_process_age
from trainwright.observe.ledger import EXCHANGE, OTHER, TRAINING, WAITING, read_ledger, sum_by_category
from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import Use, build_heartbeat_path, create_heartbeat_directory, read

ROOT = Path(__file__).parents[1]
OUTPUT = results_directory() / "ledger.json"
TINY, QUICKSTART = ROOT / "recipes" / "sft" / "tiny.yaml", ROOT / "recipes" / "sft" / "quickstart.yaml"
SHORT = ("data.limit=300", "data.validation=8", "evaluate.max_new_tokens=8")
# The recipe, its strategy and processes, other keys, and the steps of the profiled run.
CASES = {
    "tiny": (TINY, "single", 1, (), 20),
    "tiny-ddp": (TINY, "ddp", 2, (), 20),
    "tiny-fsdp": (TINY, "fsdp", 2, (), 20),
    "tiny-zero3": (TINY, "zero3", 2, (), 20),
    "quickstart": (QUICKSTART, "ddp", 2, SHORT, 4),
}
ATTRIBUTED, DIFFERENCE = 0.99, 0.05
PHASES = "PHASES_AFTER_THE_LAST_STEP"  # a variable: the directory of their files
_PHASE = re.compile(r"(?P<waiting>exchange in )?(?P<phase>.+?)(, step \d+)?(, micro-batch \d+)?")


class AfterTheLast(StepPolicy):
    """Write the seconds of every phase after the last step, before ranks wait for the one that writes the trace."""

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self._last = len(training.task.stream)

    def after(self, step: int) -> None:
        """Write them."""
        own = heartbeat.find_own_heartbeat()
        if step == self._last and own is not None:
            if self.training.world.device.type == "cuda":
                torch.cuda.synchronize()
                heartbeat.begin_phase("step policies and observers", step)  # adds up what the GPU has done by now
            seconds = sum_by_category(own.seconds(), 0.0)
            (Path(os.environ[PHASES]) / str(self.training.world.rank)).write_text(json.dumps(seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    machine = describe(use_cores(2))
    found: dict[str, Any] = {}
    for name in options.only:
        recipe, strategy, count, keys, steps = CASES[name]
        with tempfile.TemporaryDirectory(prefix="ledger-") as directory:
            asked = [str(recipe), f"parallel.strategy={strategy}", f"parallel.num_processes={count}", *keys]
            whole = attributed(asked, count, Path(directory) / "run")
            asked += [f"train.max_steps={steps}", f"train.profile.steps=[1, {steps}]"]
            found[name] = {"ranks": whole, "phases": profiled(asked, count, Path(directory) / "profiled")}
        print(name, json.dumps(found[name], indent=1), flush=True)
    rows = [
        (
            f"{name}, rank {rank['rank']}",
            *(f"{rank[key]:.2%}" for key in ("attributed", "other", "missing")),
            f"{found[name]['phases'][rank['rank']]['difference']:+.2%}",
        )
        for name, case in found.items()
        for rank in case["ranks"]
    ]
    print_table(("", "attributed", "other", "missing", "phases beside the profiler's"), rows)
    write_results(options.output, {"machine": machine, "cases": found})
    ranks = [rank for case in found.values() for rank in case["ranks"]]
    phases = [rank for case in found.values() for rank in case["phases"]]
    held = all(rank["attributed"] >= ATTRIBUTED for rank in ranks)
    return 0 if held and all(abs(rank["difference"]) <= DIFFERENCE for rank in phases) else 1


def attributed(asked: list[str], count: int, run: Path) -> list[dict[str, Any]]:
    """Return for each rank the shares of its process's life that the ledger has, calls other, and does not have."""
    process = start(asked, run)
    lives = [Life(process, run, rank) for rank in range(count)]
    finish(process)
    found = []
    for life, ledger in zip(lives, read_ledger(run), strict=True):
        wall = life.seconds()
        known, other = sum(ledger.seconds.values()), ledger.seconds.get(OTHER, 0.0)
        shares = {"attributed": (known - other) / wall, "other": other / wall, "missing": (wall - known) / wall}
        found.append({"rank": ledger.rank, "wall": wall, **shares, "seconds": dict(ledger.seconds)})
    return found


class Life:
    """How long the process of a rank exists, by the kernel's notice of its end."""

    def __init__(self, command: subprocess.Popen[bytes], run: Path, rank: int) -> None:
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._follow, args=(command, run, rank))
        self._thread.start()

    def _follow(self, command: subprocess.Popen[bytes], run: Path, rank: int) -> None:
        while command.poll() is None:
            directory = create_heartbeat_directory(run)
            beat = None if directory is None else read(build_heartbeat_path(directory, rank))
            if beat is not None:
                age, seen = compute_process_age(beat.pid), time.monotonic()
                select.select([os.pidfd_open(beat.pid)], [], [])
                self._seconds = age + time.monotonic() - seen
                return
            time.sleep(0.01)

    def seconds(self) -> float:
        self._thread.join()
        assert self._seconds > 0.0, "the process of the rank was not seen"
        return self._seconds


def profiled(asked: list[str], count: int, run: Path) -> list[dict[str, Any]]:
    """Return for each rank the seconds of the phases of steps by the ledger and by torch.profiler."""
    run.parent.joinpath("phases").mkdir()
    finish(start([*asked, "train.step_policies=['ledger:AfterTheLast']"], run, run.parent / "phases"))
    (trace,) = (run / "profile").glob("*.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    ranks = {e["pid"]: int(e["args"]["name"].split()[1]) for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "phases"}
    uses: list[dict[Use, float]] = [defaultdict(float) for _ in range(count)]
    for event in events:
        if event["ph"] == "X" and (event["pid"], event["tid"]) in tracks:
            inside = _PHASE.fullmatch(event["name"])
            assert inside is not None
            use = Use(inside["phase"], waiting=inside["waiting"] is not None)
            uses[ranks[event["pid"]]][use] += event["dur"] / 1e6
    found = []
    for rank, spent in enumerate(uses):
        ledger = json.loads((run.parent / "phases" / str(rank)).read_text())
        sums = {"ledger": together(ledger), "profiler": together(sum_by_category(spent, 0.0))}
        ours, theirs = (sum(each.values()) for each in sums.values())
        found.append({"rank": rank, **sums, "difference": ours / theirs - 1})
    return found


def together(seconds: Any) -> dict[str, float]:
    """Return the seconds of the phases of steps; a trace does not tell an exchange from waiting for other ranks."""
    found = {name: seconds.get(name, 0.0) for name in (*TRAINING, "data")}
    found[EXCHANGE] += seconds.get(WAITING, 0.0)
    return found


def start(asked: list[str], run: Path, phases: Path = Path()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainwright", "train", *asked, f"logging.run_directory={run}"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, PHASES: str(phases)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables)


def finish(command: subprocess.Popen[bytes]) -> None:
    output, _ = command.communicate()
    if command.returncode != 0:
        raise SystemExit(output.decode())


if __name__ == "__main__":
    sys.exit(main())
