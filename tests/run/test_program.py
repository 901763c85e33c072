"""Commands that run others: a stop reaches what they run, which has its time, and nothing outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, all_gone, descendants, started, wait_for
from tests.support.runs import ON_ROWS, TINY
from trainwright.engine.event_reader import read_events

# A step takes a second or so: longer than the quarter of a second that Python gives a child after ctrl-C.
LONG = (
    *(ON_ROWS, "parallel.num_processes=1", "train.compile=false", "train.max_steps=500", "train.micro_batch_size=1"),
    *(
        "train.global_batch_size=180",
        "data.pack_length=null",
        "evaluate.every=null",
        "logging.observers.tensorboard=false",
    ),
    "checkpoint.every=null",
)
PROGRAM = """
import signal, sys, time
def stop(number, frame):
    time.sleep(0.6)
    open(sys.argv[1], "a").write(f"{number} ")
    sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
open(sys.argv[2], "w").close()
time.sleep(60)
"""


@contextmanager
def ablating(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """An ablation in the middle of its first run."""
    asked = (
        "-m",
        "trainwright",
        "ablate",
        str(TINY),
        *LONG,
        "--one-at-a-time",
        "--over",
        "train.seed=1",
        "--out",
        "out",
    )
    with started(*asked, cwd=directory, output=directory / "output") as process:
        log = directory / "out" / "as-it-is" / "events.jsonl"
        wait_for(lambda: log.is_file() and any(event["event"] == "step" for event in read_events(log)))
        yield process


@pytest.mark.slow
def test_a_stopped_ablation_leaves_its_run_the_time_for_a_checkpoint(tmp_path: Path) -> None:
    with ablating(tmp_path) as process:
        family = descendants(process.pid)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 75, (tmp_path / "output").read_text()
        assert all_gone(family)
    assert len([*(tmp_path / "out" / "as-it-is" / "checkpoints").iterdir()]) == 1
    assert not (tmp_path / "out" / "seed=1").exists()


@pytest.mark.slow
def test_a_killed_ablation_stops_its_run(tmp_path: Path) -> None:
    with ablating(tmp_path) as process:
        family = descendants(process.pid)
        process.kill()
        assert all_gone(family)
    assert len([*(tmp_path / "out" / "as-it-is" / "checkpoints").iterdir()]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_what_runs_beside_curves_is_told_of_a_stop(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    asked = ("-m", "trainwright", "tensorboard", ".", sys.executable, "program.py", "told", "ready")
    with started(*asked, cwd=tmp_path) as process:
        wait_for((tmp_path / "ready").is_file)
        family = descendants(process.pid)
        os.kill(process.pid, number)
        assert process.wait(PATIENCE) == 7
        assert (tmp_path / "told").read_text() == f"{int(number)} "
        assert all_gone(family)


def test_nothing_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    asked = ("-m", "trainwright", "tensorboard", ".", sys.executable, "program.py", "told", "ready")
    with started(*asked, cwd=tmp_path) as process:
        wait_for((tmp_path / "ready").is_file)
        family = descendants(process.pid)
        assert len(family) == 2
        process.kill()
        assert all_gone(family)
    assert (tmp_path / "told").read_text() == f"{int(signal.SIGTERM)} "
