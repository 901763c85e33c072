"""How long a user waits from `trainwright submit` to the first step, beside `srun` of the bare worker, on a real Slurm.

    python bench/submit.py --pairs 5

Both start the smallest recipe on one node, in turn, on a Slurm of two idle nodes on this machine. The seconds are those
from the command to the first step, by the clock of the run's events. They have parts: the command itself until sbatch
has answered, the queue, and the job from its start to the first step; `measured` is what of the last went into the
quick measurement of the processor, which a run makes where there is no undisturbed one in the cache. Needs root and
Slurm's daemons (apt-get install slurmctld slurmd slurm-client munge).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from support.machine import describe
from support.results import results_directory
from support.runs import write_results

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.commands import environment, wait_for  # noqa: E402
from tests.support.slurm import Slurm, why_not  # noqa: E402
from trainwright.faults.drills.invariants import read_lines  # noqa: E402

RESULTS = results_directory() / "submit.json"
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
SETTINGS = (
    f"data.train={ROOT / 'tests' / 'engine' / 'golden' / 'rows.jsonl'}",
    *("data.validation=null", "logging.observers.tensorboard=false", "train.max_steps=2", "parallel.num_processes=1"),
)
_MEASURED = re.compile(r"^measured this processor in ([\d.]+) s", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 3
    machine = describe(sorted(os.sched_getaffinity(0)))
    work = Path(tempfile.mkdtemp(prefix="submit-"))
    slurm = Slurm(work / "slurm", {"TRAINWRIGHT_CACHE": str(work / "cache")})
    try:
        found = [_pair(slurm, work, number) for number in range(options.pairs + 1)][1:]  # the first fills the caches
    finally:
        slurm.close()
        shutil.rmtree(work)
    for pair in found:
        print("; ".join(f"{name} {parts['seconds']:.2f} s" for name, parts in pair.items()))
    over = [pair["submit"]["seconds"] - pair["srun"]["seconds"] for pair in found]
    print(f"submit takes {statistics.median(over):+.2f} s more (median; {min(over):+.2f} to {max(over):+.2f})")
    write_results(RESULTS, {"machine": machine, "pairs": found, "over": over, "median": statistics.median(over)})
    return 0 if statistics.median(over) <= 3.0 else 1


def _pair(slurm: Slurm, work: Path, number: int) -> dict[str, dict[str, float]]:
    ways = {"submit": _submit, "srun": _srun}
    names = sorted(ways, reverse=bool(number % 2))  # in turn, and the first of a pair in turn
    found = {name: ways[name](slurm, work / f"{name}-{number}") for name in names}
    wait_for(slurm.is_idle, every=0.2)
    return found


def _submit(slurm: Slurm, run: Path) -> dict[str, float]:
    begun = time.time()
    words = ("submit", str(RECIPE), *SETTINGS, f"logging.run_directory={run}", "--to", "slurm")
    said = slurm.run(sys.executable, "-m", "trainwright", *words, cwd=run.parent)
    answered = time.time()
    job = said.splitlines()[-2].removeprefix("job ")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    log = "".join(file.read_text() for file in (run / "slurm").glob("*.log"))
    shown = dict(re.findall(r"(\w+)=(\S*)", slurm.run("scontrol", "show", "job", "--oneliner", job)))
    queued = _seconds(shown["StartTime"]) - _seconds(shown["SubmitTime"])  # whole seconds, as Slurm has them
    return {**_wait(run, log, begun), "command": answered - begun, "queued": queued}


def _srun(slurm: Slurm, run: Path) -> dict[str, float]:
    begun = time.time()
    words = ("trainwright.worker", str(RECIPE), *SETTINGS, f"logging.run_directory={run}")
    command = ("srun", "--ntasks=1", "--cpus-per-task=2", sys.executable, "-m", *words)
    done = subprocess.run(
        command, cwd=run.parent, env=environment(**slurm.variables), capture_output=True, text=True, check=True
    )
    return _wait(run, done.stdout + done.stderr, begun)


def _wait(run: Path, log: str, begun: float) -> dict[str, Any]:
    step = next(event for event in read_lines(run) if event["event"] == "step")
    measured = sum(map(float, _MEASURED.findall(log)))
    return {"seconds": step["time"] - step["step_time"] - begun, "measured": measured}


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    sys.exit(main())
