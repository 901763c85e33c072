"""Attempts at a run in jobs that are started again by their exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import all_gone, descendants, environment, started, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, events
from trainwright.clusters.job_attempts import MODULE, choose_exit_code, remove_process_variables

SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"
SETTINGS = (ON_ROWS, "data.validation=null", "logging.observers.tensorboard=false", "checkpoint.every=1000", SLOW)


@pytest.mark.parametrize(
    ("code", "ends"), [(0, 0), (2, 2), (3, 3), (4, 4), (1, 1), (5, 5), (75, 75), (137, 5), (139, 5)]
)
def test_a_signal_counts_as_a_fault_of_the_machine(code: int, ends: int, tmp_path: Path) -> None:
    assert choose_exit_code(tmp_path, 0, code) == ends


@pytest.mark.parametrize("name", ["stop.taken", "stop"])  # `stop`: it came when the run was ending for another reason
def test_a_run_that_was_asked_to_stop_is_done(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert [choose_exit_code(tmp_path, 0, code) for code in (75, 5, 4)] == [0, 5, 4]


@pytest.mark.parametrize("name", ["stop.taken", "stop"])
def test_a_stop_of_an_earlier_job_is_not_one_of_this_attempt(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.touch()
    os.utime(file, (0, 0))
    assert choose_exit_code(tmp_path, 0, 75) == 75


def test_attempts_without_a_new_checkpoint_are_bounded_on_each_node(tmp_path: Path) -> None:
    assert [choose_exit_code(tmp_path, 0, 5) for _ in range(4)] == [5, 5, 5, 4]
    assert choose_exit_code(tmp_path, 1, 75) == 75
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert choose_exit_code(tmp_path, 0, 5) == 5


def test_attempts_on_machines_that_share_only_a_place_are_bounded(tmp_path: Path) -> None:
    copies = str(tmp_path / "copies")
    assert [choose_exit_code(tmp_path / str(machine) / "run", 0, 5, copies) for machine in range(4)] == [5, 5, 5, 4]
    assert choose_exit_code(tmp_path / "4" / "other", 0, 5, copies) == 5


def test_the_variables_of_an_operators_workers_are_not_passed_on() -> None:
    given = dict.fromkeys(["RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK", "PET_NNODES", "PATH", "HF_HOME"], "1")
    assert set(remove_process_variables(given)) == {"PATH", "HF_HOME"}


def test_a_run_does_not_outlive_its_attempt(tmp_path: Path) -> None:
    waits = ("--nodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:9")
    with started("-m", MODULE, "run", "--", str(TINY), *waits, cwd=tmp_path) as attempt:
        family = wait_for(lambda: descendants(attempt.pid))
        attempt.kill()
        attempt.wait()
        assert all_gone(family)


def start(run: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    train = [str(TINY), *SETTINGS, f"logging.run_directory={run}", "--resume", "auto"]
    command = [sys.executable, "-m", MODULE, str(run), *words, "--", *train, "train.max_steps=30"]
    # As the operator for PyTorchJobs sets them.
    operator = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456", "PET_NNODES": "1"}
    return subprocess.Popen(command, env=environment(**operator, **variables), cwd=run.parent, text=True)


def at_step(run: Path, step: int) -> None:
    wait_for(lambda: (run / "events.jsonl").exists() and len(events(run, "step")) >= step, every=0.2)


@pytest.mark.slow
def test_a_preempted_pod_is_worth_another_attempt_and_a_stopped_run_is_not(runs: Runs, tmp_path: Path) -> None:
    """Kubernetes signals the first process of the pod, and starts pods again by their codes."""
    run = tmp_path / "run"
    pod = start(run, "--add", "128")
    at_step(run, 3)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait() == 75 + 128
    pod = start(run, TRAINWRIGHT_JOB_RESTARTS="1")
    before = len(events(run, "step"))
    at_step(run, before + 3)
    (run / "stop").touch()  # what `trainwright stop` makes
    assert pod.wait() == 0 and events(run, "finish")[-1]["status"] == "stopped"
    count = len(events(run, "step"))
    assert start(run, TRAINWRIGHT_JOB_RESTARTS="2").wait() == 0  # by a node that was lost meanwhile
    assert len(events(run, "step")) == count
    assert start(run).wait() == 0  # created again by its user
    assert events(run, "finish")[-1]["status"] == "finished"
    undisturbed = runs.trained(*SETTINGS[:-1], "train.max_steps=30", "parallel.num_processes=1")
    assert column(run, "loss") == column(undisturbed, "loss")


@pytest.mark.slow
def test_a_wrong_request_is_no_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start(run, "--add", "128", TRAINWRIGHT_MACHINE=os.devnull).wait() in (2, 3)
    assert not run.exists()
