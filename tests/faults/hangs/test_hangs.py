"""Runs that hang: the late rank, its phase and the stacks are reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.commands import ROOT, descendants, environment, wait_for
from tests.support.forked import Finished, Started
from tests.support.runs import ON_ROWS, TINY, Runs, events
from tests.support.workers import srun, start_workers
from trainwright.utils.heartbeat import build_heartbeat_path, create_heartbeat_directory, read

CHECKING = "train.step_policies=['tests.support.checking:SlowChecking']"
POLICY = "train.step_policies=['tests.support.hanging:Hanging']"


def train(runs: Runs, hang: str, *overrides: str, seconds: float = 600) -> Started:
    run = runs.new_directory("run")
    fixed = (f"logging.run_directory={run}", "logging.observers.tensorboard=false", ON_ROWS, "data.validation=8")
    two = ("parallel.num_processes=2", "train.max_steps=12", "train.global_batch_size=4", POLICY)
    variables = {"HANG": hang, "HANG_SECONDS": str(seconds)}
    started = runs.command("train", str(TINY), *fixed, *two, *overrides, **variables)
    started.run = run
    return started


def stops(runs: Runs, hang: str, *overrides: str, code: int = 5) -> tuple[Finished, Path]:
    """What a run that ends when it hangs has written."""
    started = train(runs, hang, "faults.on_hang=stop", *overrides)
    ended = started.wait()
    assert ended.code == code, ended.stdout + ended.stderr
    assert started.run is not None
    return ended, started.run


@pytest.mark.slow
def test_a_suspended_worker_is_reported_and_the_run_ends(runs: Runs) -> None:
    """By a signal that it gets before a step's gradients: rank 0 waits for it in the exchange of them."""
    started = train(runs, "stop:1:4", "faults.on_hang=stop")
    started.wait_for_step(3)
    assert started.run is not None
    directory = create_heartbeat_directory(started.run)
    assert directory is not None
    beats = {rank: read(build_heartbeat_path(directory, rank)) for rank in range(2)}
    worker = beats[1]
    assert worker is not None and worker.pid in [process.pid for process in descendants(started.pid)]
    ended = started.wait()
    assert ended.code == 5
    assert "rank 1 has been suspended by a signal (SIGSTOP)" in ended.stderr
    assert re.search(r"rank 0 has entered \w+.* at \S+\.py:\d+ \(number \d+\), which rank 1 has not", ended.stderr)
    assert "in forward_backward" in (started.run / "logs" / "rank-0.stacks").read_text()
    (fault,) = events(started.run, "fault")
    assert (fault["kind"], fault["rank"], fault["action"]) == ("hang", 1, "stop")
    assert not directory.exists()
    wait_for(lambda: not any(psutil.pid_exists(each.pid) for each in beats.values() if each is not None))


@pytest.mark.slow
def test_a_run_that_only_warns_goes_on_to_the_same_losses(runs: Runs) -> None:
    started = train(runs, "data:1:4", seconds=14)
    ended = started.wait()
    assert ended.code == 0, ended.stderr
    assert "warning: the run hangs: rank 1 has made no progress" in ended.stderr
    assert "in phase data of step 4" in ended.stderr
    assert "hanging.py" in ended.stderr and "in _hang" in ended.stderr
    assert "the run goes on" in ended.stderr
    assert started.run is not None
    (fault,) = events(started.run, "fault")
    assert (fault["kind"], fault["rank"], fault["action"]) == ("hang", 1, "warn")
    assert [event["step"] for event in events(started.run, "step")] == list(range(1, 13))


@pytest.mark.slow
def test_a_slow_first_step_is_no_hang(runs: Runs) -> None:
    started = train(runs, "data:1:1", "faults.on_hang=stop", "train.max_steps=3", seconds=14)
    ended = started.wait()
    assert ended.code == 0 and "hangs" not in ended.stderr, ended.stderr
    assert started.run is not None and not events(started.run, "fault")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seconds"), [(1, 0), pytest.param(2, 14, marks=pytest.mark.slow)])
def test_verifying_a_checkpoint_for_long_is_no_hang_when_a_run_resumes(runs: Runs, count: int, seconds: int) -> None:
    file, run = runs.directory / f"checked-{seconds}", runs.new_directory("run")
    settings = (
        f"logging.run_directory={run}",
        "logging.observers.tensorboard=false",
        ON_ROWS,
        "data.validation=null",
        CHECKING,
    )
    settings += ("train.max_steps=2", f"parallel.num_processes={count}", "faults.on_hang=stop")
    variables = {"CHECKING_SECONDS": str(seconds), "CHECKING_FILE": str(file)}
    assert runs.command("train", str(TINY), *settings, **variables).wait().code == 0
    ended = runs.command("train", "--resume", str(run), "train.max_steps=4", **variables).wait()
    assert ended.code == 0 and "hangs" not in ended.stderr, ended.stderr
    assert set(file.read_text().split()) == {"resuming"}


@pytest.mark.slow
def test_verifying_a_checkpoint_for_long_is_no_hang_when_a_run_rewinds(runs: Runs) -> None:
    file, run = runs.directory / "checked-rewind", runs.new_directory("run")
    settings = (
        f"logging.run_directory={run}",
        "logging.observers.tensorboard=false",
        ON_ROWS,
        "data.validation=null",
        CHECKING,
    )
    settings += ("train.max_steps=6", "checkpoint.every=2", "faults.on_hang=stop")
    variables = {"CHECKING_SECONDS": "14", "CHECKING_FILE": str(file), "CHECKING_REWINDS": "1"}
    ended = runs.command("train", str(TINY), *settings, **variables).wait()
    assert ended.code == 0 and "hangs" not in ended.stderr, ended.stderr
    assert set(file.read_text().split()) == {"rewinding"}
    (rewind,) = events(run, "rewind")
    assert (rewind["resumed_from"], rewind["left_out"]) == (4, [5])


@pytest.mark.slow
def test_an_end_that_takes_long_is_no_hang(runs: Runs) -> None:
    """It is not compared with the checkpoints before it."""
    run = runs.new_directory("run")
    settings = (f"logging.run_directory={run}", "logging.observers.tensorboard=false", ON_ROWS, "data.validation=null")
    settings += ("checkpoint.every=1", "logging.observers=['tests.support.hanging:slow_to_finish']")
    words = ("--until", "step 6", *settings, "parallel.num_processes=1", "faults.on_hang=stop")
    ended = runs.command("train", str(TINY), *words, HANG_SECONDS="20").wait()
    assert ended.code == 75 and "hangs" not in ended.stderr, ended.stdout + ended.stderr
    assert not events(run, "fault")


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory_by_workers_of_another_launcher(runs: Runs) -> None:
    workers = start_workers(runs, srun(2, "417"), ON_ROWS, "parallel.num_processes=2", "train.max_steps=2")
    for worker in workers:
        ended = worker.wait()
        assert ended.code == 0, ended.stderr
    assert workers[0].run is not None
    directory = create_heartbeat_directory(workers[0].run)
    assert directory is not None
    directory.rmdir()  # raises OSError unless it is empty


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_sample_of_the_bench_is_named_right(tmp_path: Path) -> None:
    """A hang of each of the twelve kinds, as `bench/hangs.py` draws them; how soon depends on the machine's load."""
    verdicts = tmp_path / "hangs.jsonl"
    where = ["--results", str(verdicts), "--output", str(tmp_path / "hangs.json")]
    command = [sys.executable, str(ROOT / "bench" / "hangs.py"), "--trials", "12", "--jobs", "2", *where]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1400)
    found = [json.loads(line) for line in verdicts.read_text().splitlines()]
    assert len(found) == 12 and all(each["right"] for each in found), ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "phase", "frame"),
    [
        ("data", "data", "_hang"),
        ("forward", "forward", "_hang"),
        ("optimizer", "optimizer", "_hang"),
        ("collective", "step policies and observers", "_hang"),
        ("checkpoint", "checkpoint", "_hang"),
        ("evaluation", "evaluation", "_hang"),
        ("generation", "generation", "_hang"),
        ("missing", "", None),
        ("gil", "data", "before"),
        ("loop", "metrics", "metrics"),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_rank_and_the_phase_of_a_hang_are_named(
    runs: Runs, kind: str, phase: str, frame: str | None, strategy: str
) -> None:
    often = ("checkpoint.every=3", "evaluate.every=3", "evaluate.prompts=[a, b]", f"parallel.strategy={strategy}")
    # A rank that leaves a collective out enters the next one: the run's own fault, which would occur again.
    ended, run = stops(runs, f"{kind}:1:6", *often, code=4 if kind == "missing" else 5)
    (fault,) = events(run, "fault")
    assert (fault["kind"], fault["rank"]) == ("hang", 1)
    assert f"in phase {phase}" in fault["detail"]
    assert frame is None or f"in {frame}" in ended.stderr


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("order", "ddp"),
        *(pytest.param(kind, "ddp", marks=pytest.mark.slow) for kind in ("shape", "dtype")),
        *(pytest.param(kind, "fsdp", marks=pytest.mark.slow) for kind in ("order", "shape", "dtype")),
    ],
)
def test_different_collectives_are_named_by_rank_and_line(runs: Runs, kind: str, strategy: str) -> None:
    """They are the run's own fault, and would occur again."""
    ended = train(runs, f"{kind}:1:4", "faults.on_hang=stop", f"parallel.strategy={strategy}").wait()
    assert ended.code == 4, ended.stdout + ended.stderr
    line = r"\S+/hanging\.py:\d+"
    ones = {"order": r"broadcast of float32\[5\]", "shape": r"all_reduce of float32\[1000000\]"}
    one = ones.get(kind, r"all_reduce of float64\[3\]")
    three = r"all_reduce of float32\[3\]"
    pairs = [(three, one), (one, three)]
    found = [rf"rank [01] has entered {a} at {line}, and rank [01] {b} at {line}" for a, b in pairs]
    assert any(re.search(pattern, ended.stderr) for pattern in found), ended.stderr


@pytest.mark.slow
def test_different_collectives_that_repeat_at_the_same_step_are_not_retried_again(runs: Runs) -> None:
    started = train(runs, "shape:1:4", "checkpoint.every=2")
    ended = started.wait()
    assert ended.code == 4, ended.stderr
    assert "the same error happened twice after step" in ended.stderr
    assert started.run is not None and len(events(started.run, "restart")) == 1


@pytest.mark.slow
def test_a_collective_fails_after_the_timeout_of_the_recipe(runs: Runs) -> None:
    ended = train(runs, "data:1:4", "parallel.timeout=3 s").wait()
    assert ended.code == 5
    assert "Timed out" in ended.stderr or "timed out" in ended.stderr, ended.stderr
