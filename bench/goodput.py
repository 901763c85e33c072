"""Kill a worker of a run again and again while slots leave and come back, and see what becomes of the run.

    python bench/goodput.py --kills 20 --every 20

A seed draws when the slots change, to how many of 1 to 3, and which rank is killed. Nobody touches the run otherwise.
Its losses are compared with those of the same run on a fixed number of processes. Goodput is the share of the time
from the first event of the run to its last that went into steps that count; the rest are starts, checkpoints, steps
that were done again, and the time until a failure was noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.machine import describe
from support.results import results_directory
from support.runs import write_results

from trainwright.engine.event_reader import read_events
from trainwright.utils.heartbeat import build_heartbeat_path, create_heartbeat_directory, read

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
RESULTS = results_directory() / "goodput.json"
MOST = 3
# With the recipe's own learning rate, undisturbed runs on 1 and 3 processes differ by 1e-3 after 200 steps: training
# amplifies the rounding of sums.
SETTINGS = (
    "optimizer.learning_rate=1e-5",
    *(f"data.train={ROWS}", "train.global_batch_size=96", "train.micro_batch_size=8", "train.mixed_precision=no"),
    *("parallel.strategy=ddp", "evaluate.every=null", "logging.observers.tensorboard=false"),
)


def main() -> int:
    options = _parse()
    machine = describe(sorted(os.sched_getaffinity(0)))
    killed, undisturbed = options.work / "killed", options.work / "undisturbed"
    options.work.mkdir(parents=True, exist_ok=True)
    steps, own = f"train.max_steps={options.steps}", f"parallel.num_processes={{min: 1, max: {MOST}}}"
    if not (killed / "final").is_dir():
        survives = "faults.restarts=1000 per hour", f"faults.mean_time_between={options.every} s"
        command = _start(killed, steps, own, *survives)
        _disturb(killed, command, options.seed, options.kills, options.every)
        if command.wait() != 0:
            print(f"the run did not finish; see {killed}")
            return 1
    if not (undisturbed / "final").is_dir() and _start(undisturbed, steps, "parallel.num_processes=2").wait() != 0:
        return 1
    given = {"machine": machine, "seed": options.seed, "every": options.every, "steps": options.steps}
    results = {**given, **_compared(killed, undisturbed)}
    write_results(RESULTS, results)
    print(f"finished by itself after {results['kills']} kills, on {results['world_sizes']} processes")
    print(f"largest relative difference of a loss: {results['difference']:.1e}")
    print(f"goodput: {results['goodput']:.1%} of {results['wall_seconds']:.0f} s")
    if results["difference"] > 1e-5:
        return 1
    for run in (killed, undisturbed):
        shutil.rmtree(run)
    return 0


def _start(run: Path, *settings: str) -> subprocess.Popen[bytes]:
    words = (str(RECIPE), f"logging.run_directory={run}", *SETTINGS, *settings)
    return subprocess.Popen([sys.executable, "-m", "trainwright", "train", *words], stdout=subprocess.DEVNULL)


def _disturb(run: Path, command: subprocess.Popen[bytes], seed: int, kills: int, every: float) -> None:
    """Change the slots and kill a worker every so many seconds, until the run is over."""
    chance, begun = random.Random(seed), time.monotonic()
    for number in range(1, kills + 1):
        slots = [chance.randint(1, MOST), chance.randint(1, MOST)]
        if chance.random() < 0.5:  # between two kills
            _wait(command, begun + (number - 0.5) * every)
            _set_slots(run, slots[0])
        _wait(command, begun + number * every)
        while not (pids := _workers(run)) and command.poll() is None:  # it is starting
            time.sleep(0.1)
        if command.poll() is not None:
            return
        _set_slots(run, slots[1])
        os.kill(pids[chance.choice(sorted(pids))], signal.SIGKILL)


def _wait(command: subprocess.Popen[bytes], until: float) -> None:
    while time.monotonic() < until and command.poll() is None:
        time.sleep(0.1)


def _set_slots(run: Path, slots: int) -> None:
    if run.is_dir():
        (run / "slots").write_text(str(slots))


def _workers(run: Path) -> dict[int, int]:
    """Return the pids of the workers by rank."""
    directory = create_heartbeat_directory(run) if run.is_dir() else None
    if directory is None:
        return {}
    beats = {rank: read(build_heartbeat_path(directory, rank)) for rank in range(MOST)}
    return {rank: beat.pid for rank, beat in beats.items() if beat is not None and Path(f"/proc/{beat.pid}").is_dir()}


def _compared(killed: Path, undisturbed: Path) -> dict[str, Any]:
    events, other = read_events(killed / "events.jsonl"), read_events(undisturbed / "events.jsonl")
    steps, expected = ([each for each in found if each["event"] == "step"] for found in (events, other))
    assert [each["step"] for each in steps] == [each["step"] for each in expected], "a step is missing or repeated"
    recorded = [json.loads(line) for line in (killed / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = [(one["loss"], two["loss"]) for one, two in zip(steps, expected, strict=True)]
    wall, useful = recorded[-1]["time"] - recorded[0]["time"], sum(each["step_time"] for each in steps)
    return {
        "kills": sum(each["event"] == "restart" for each in recorded),
        "world_sizes": [each["world_size"] for each in recorded if each["event"] == "start"],
        "steps_done_again": sum(each["event"] == "step" for each in recorded) - len(steps),
        "difference": max(abs(one - two) / abs(two) for one, two in pairs),
        "wall_seconds": wall,
        "goodput": useful / wall,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=500, help="of the run; enough to outlast the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "trainwright" / "goodput",
        metavar="DIRECTORY",
        help="for the two runs; what is finished there is not done again",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
