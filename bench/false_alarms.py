"""Train under conditions that make healthy runs slow or uneven, and count how often one is reported to hang.

    python bench/false_alarms.py --minutes 120      in all; a bench that was interrupted goes on
    python bench/false_alarms.py --conditions suspended "slow disk" --minutes 10

A seed draws the strategy and the number of processes of every run. Each line of the results is one run: how long it
took and what was reported. Exit code 1 if anything was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from support.machine import describe
from support.results import results_directory
from support.runs import print_table, write_results

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "sft" / "tiny.yaml"
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
BLKIO = Path("/sys/fs/cgroup/blkio")
SPREADS = (("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("zero3", 2))
# Checkpoints of a model of a few MB, on a disk that writes 256 KiB a second.
DISK_BYTES = 256 * 1024
SUSPENDED_SECONDS = 20.0

Condition = Callable[[subprocess.Popen[bytes], random.Random], Any]


@contextmanager
def busy(command: subprocess.Popen[bytes], chance: random.Random) -> Iterator[None]:
    """Use a core in bursts of seconds, by a program that is not part of the run."""
    code = (
        "import random, time\n"
        f"chance = random.Random({chance.random()})\n"
        "while True:\n"
        "    until = time.monotonic() + chance.uniform(1, 20)\n"
        "    while time.monotonic() < until:\n"
        "        pass\n"
        "    time.sleep(chance.uniform(0, 5))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as load:
        try:
            yield
        finally:
            load.kill()


@contextmanager
def slow_disk(command: subprocess.Popen[bytes], chance: random.Random) -> Iterator[None]:
    """Limit how fast the run writes, from its start on, by a control group of block devices."""
    group = BLKIO / f"false-alarms-{os.getpid()}"
    group.mkdir()
    try:
        device = os.stat(tempfile.gettempdir()).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {DISK_BYTES}"
        (group / "blkio.throttle.write_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(command.pid))
        yield
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.1)
        group.rmdir()


@contextmanager
def suspended(command: subprocess.Popen[bytes], chance: random.Random) -> Iterator[None]:
    """Suspend all processes of the run at once, for 20 s, after 20 to 60 s, as a laptop does when it is closed."""
    code = (
        "import os, signal, sys, time\n"
        "import psutil\n"
        "run = psutil.Process(int(sys.argv[1]))\n"
        "time.sleep(float(sys.argv[2]))\n"
        "family = [run, *run.children(recursive=True)]\n"
        "for number in (signal.SIGSTOP, signal.SIGCONT):\n"
        "    for member in family:\n"
        "        if member.is_running():\n"
        "            os.kill(member.pid, number)\n"
        f"    time.sleep({SUSPENDED_SECONDS})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(command.pid), str(chance.uniform(20, 60))], stderr=subprocess.DEVNULL
    ) as hand:
        try:
            yield
        finally:
            if command.poll() is not None:  # else it is suspended, and goes on in a moment
                hand.terminate()


# By name: settings of the run, and what is done beside it.
CONDITIONS: dict[str, tuple[tuple[str, ...], tuple[Condition, ...]]] = {
    "load": (("train.max_steps=1000",), (busy, busy)),
    "compile": (("train.max_steps=400", "train.compile=true"), (busy,)),
    "evaluations": (
        ("train.max_steps=300", "evaluate.every=10", "evaluate.prompts=['What is a list?', 'What is a set?']"),
        (busy,),
    ),
    "slow disk": (("train.max_steps=600", "checkpoint.every=20", "evaluate.every=200"), (slow_disk,)),
    "slow disk, waited for": (
        ("train.max_steps=300", "checkpoint.every=20", "checkpoint.background=false", "evaluate.every=200"),
        (slow_disk, busy),
    ),
    "suspended": (("train.max_steps=1000", "evaluate.every=200"), (suspended,)),
}


def main() -> int:
    options = _parse()
    lines = [json.loads(line) for line in options.lines.read_text().splitlines()] if options.lines.exists() else []
    refused = _refused()
    names = [name for name in options.conditions if name not in refused]
    for name in refused.keys() & options.conditions:
        print(f"{name}: skipped: {refused[name]}")
    while sum(line["seconds"] for line in lines) < 60 * options.minutes:
        lines.append(_attempt(names[len(lines) % len(names)], options.seed + len(lines)))
        with options.lines.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(lines[-1], flush=True)
    return _report(lines, refused, options.output)


def _attempt(condition: str, seed: int) -> dict[str, Any]:
    """Train once under a condition; return what was reported."""
    chance = random.Random(seed)
    settings, beside = CONDITIONS[condition]
    strategy, processes = chance.choice(SPREADS)
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as temporary, ExitStack() as stack:
        run = Path(temporary) / "run"
        words = (
            *(str(RECIPE), f"data.train={ROWS}", "data.validation=32", "train.global_batch_size=16"),
            *(f"logging.run_directory={run}", "logging.observers.tensorboard=false"),
            *(f"parallel.strategy={strategy}", f"parallel.num_processes={processes}", "faults.on_hang=warn", *settings),
        )
        begun = time.monotonic()
        with (Path(temporary) / "output").open("wb") as output:
            command = subprocess.Popen(
                [sys.executable, "-m", "trainwright", "train", *words], stdout=output, stderr=output
            )
            stack.callback(_end, command)
            for each in beside:
                stack.enter_context(each(command, chance))
            code = command.wait()
        said = (Path(temporary) / "output").read_text(errors="replace")
        if code:
            raise SystemExit(f"{condition}, {strategy} on {processes}: the run ended with {code}:\n{said}")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {
        "condition": condition,
        "strategy": strategy,
        "processes": processes,
        "seed": seed,
        "seconds": round(time.monotonic() - begun, 1),
        "steps": sum(event["event"] == "step" for event in events),
        "reports": [e["detail"] for e in events if e["event"] == "fault" and e["kind"] == "hang"],
    }


def _end(command: subprocess.Popen[bytes]) -> None:
    with suppress(psutil.Error):
        family = psutil.Process(command.pid).children(recursive=True)
        for member in [command, *family]:
            with suppress(psutil.Error, ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)


def _refused() -> dict[str, str]:
    """Return the conditions that this machine cannot have, with the reason."""
    probe = BLKIO / f"false-alarms-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        reason = f"no control group for block devices: {error.strerror}"
        return {name: reason for name, (_, beside) in CONDITIONS.items() if slow_disk in beside}
    return {}


def _report(lines: list[dict[str, Any]], refused: dict[str, str], output: Path) -> int:
    rows, conditions = [], {}
    for name in CONDITIONS:
        of_name = [line for line in lines if line["condition"] == name]
        if of_name:
            alarms = sum(bool(line["reports"]) for line in of_name)
            minutes = sum(line["seconds"] for line in of_name) / 60
            conditions[name] = {"runs": len(of_name), "minutes": round(minutes, 1), "reported": alarms}
            rows.append((name, str(len(of_name)), f"{minutes:.0f}", str(alarms)))
    print_table(("condition", "runs", "minutes", "reported to hang"), rows)
    minutes = round(sum(line["seconds"] for line in lines) / 60, 1)
    results = {"minutes": minutes, "conditions": conditions, "skipped": refused, "machine": describe([])}
    write_results(output, results)
    return int(any(line["reports"] for line in lines))


def _parse() -> argparse.Namespace:
    results = results_directory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no run after this time, over all pieces")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=Path, default=results / "false_alarms.jsonl", help="the runs, one a line")
    parser.add_argument("--output", type=Path, default=results / "false_alarms.json", help="the summary")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
