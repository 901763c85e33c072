"""The exit codes of the table in docs/runs.md under each way to start a run."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.commands import PATIENCE, descendants, environment, wait_for
from tests.support.forked import Started
from tests.support.runs import ON_ROWS, TINY, Runs
from tests.support.workers import open_mpi, srun, start_workers
from trainwright.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_MACHINE, EXIT_REQUEST, EXIT_STOPPED, EXIT_TRAINING
from trainwright.run.shutdown.exit_code import CODES_FILE, read_exit_code, record_exit_code, record_start
from trainwright.utils.heartbeat import build_heartbeat_path, create_heartbeat_directory, read

_jobs = (f"{os.getpid()}{number:04}" for number in itertools.count())
FIXED = (ON_ROWS, "data.validation=null", "logging.observers.tensorboard=false", "faults.restarts=off")


@dataclass
class Running:
    """A run that has been started.

    Attributes:
        codes: waits for its end; returns the exit codes that a user or a scheduler sees.
        stop: sends the signal that a scheduler would.
    """

    run: Path
    codes: Callable[[], list[int]]
    stop: Callable[[], None]

    def kill(self, rank: int) -> None:
        """Kill a worker once it has trained."""
        self.wait_for_step()
        directory = create_heartbeat_directory(self.run)
        assert directory is not None
        beat = wait_for(lambda: read(build_heartbeat_path(directory, rank)))
        psutil.Process(beat.pid).kill()

    def wait_for_step(self) -> None:
        """Until a step has been recorded."""
        log = self.run / "events.jsonl"
        wait_for(lambda: log.exists() and '"event": "step"' in log.read_text())


def of_started(run: Path, processes: list[Started]) -> Running:
    return Running(run, lambda: [each.wait().code for each in processes], lambda: processes[-1].kill(signal.SIGTERM))


def under(runs: Runs, run: Path, launcher: list[str], overrides: tuple[str, ...], cwd: Path) -> Running:
    words = [str(TINY), f"logging.run_directory={run}", *FIXED, *overrides]
    command = [sys.executable, "-m", "trainwright", "under", sys.executable, "-m", *launcher, *words]
    variables = environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache"))
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, env=variables, cwd=cwd, stdout=nowhere, stderr=nowhere)

    def code() -> list[int]:
        try:
            return [process.wait(PATIENCE)]
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [*descendants(process.pid), psutil.Process(process.pid)]:
                    each.kill()

    return Running(run, code, lambda: process.send_signal(signal.SIGTERM))


def start(kind: str, runs: Runs, directory: Path, *overrides: str) -> Running:
    """Start a run of two processes."""
    run = runs.new_directory("run")
    if kind in ("srun", "mpirun"):
        variables = srun(2, next(_jobs)) if kind == "srun" else open_mpi(2, next(_jobs))
        return of_started(run, start_workers(runs, variables, *FIXED, *overrides, run=run))
    if kind == "torchrun":
        launcher = ["torch.distributed.run", "--nproc-per-node=2", "-m", "trainwright.worker"]
        return under(runs, run, launcher, overrides, directory)
    if kind == "accelerate":
        (directory / "fsdp.yaml").write_text(
            "distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\nnum_machines: 1\nmixed_precision: 'no'\n"
            "fsdp_config: {fsdp_version: 2}\n"
        )
        launcher = ["accelerate.commands.launch", "--config_file", "fsdp.yaml", "-m", "trainwright.worker"]
        return under(runs, run, launcher, overrides, directory)
    words = ("train", str(TINY), f"logging.run_directory={run}", *FIXED, *overrides)
    if kind == "one node":
        two = () if any("num_processes" in each for each in overrides) else ("parallel.num_processes=2",)
        return of_started(run, [runs.command(*words, *two)])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = ("--nodes=2", f"--rendezvous=127.0.0.1:{probe.getsockname()[1]}")
    nodes = [runs.command(*words, *place, f"--node-rank={node}", "--num-processes=2") for node in range(2)]
    return of_started(run, nodes)


KINDS = [
    "one node",
    "nodes",
    "srun",
    "mpirun",
    "torchrun",
    pytest.param(
        "accelerate",
        marks=pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
    ),
]
LONG = "train.max_steps=5000"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        (EXIT_FINISHED, ("train.max_steps=2",)),
        (EXIT_REQUEST, ("optimizer.learning_rat=1",)),
        # A Slurm job or torchrun has started another number; a command has no such strategy's library or device.
        (EXIT_MACHINE, ("parallel.device=cuda",)),
        (EXIT_TRAINING, (LONG, "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0")),
    ],
)
def test_a_run_that_ends_by_itself(
    runs: Runs, tmp_path: Path, kind: str, code: int, overrides: tuple[str, ...]
) -> None:
    assert set(start(kind, runs, tmp_path, *overrides).codes()) == {code}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_a_fault(runs: Runs, tmp_path: Path, kind: str) -> None:
    running = start(kind, runs, tmp_path, LONG)
    running.kill(1)
    codes = running.codes()
    if kind in ("srun", "mpirun"):  # what they show is the largest; the worker itself has the code of its signal
        codes.remove(-signal.SIGKILL)
    assert set(codes) == {EXIT_FAULT}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_has_its_code(runs: Runs, tmp_path: Path, kind: str) -> None:
    running = start(kind, runs, tmp_path, LONG)
    running.wait_for_step()
    running.stop()
    assert set(running.codes()) == {EXIT_STOPPED}


@pytest.mark.slow
def test_a_single_worker_that_is_killed_under_torchrun_is_a_fault(runs: Runs, tmp_path: Path) -> None:
    """It cannot record a code itself, and no other process of the run does."""
    launcher = ["torch.distributed.run", "--nproc-per-node=1", "-m", "trainwright.worker"]
    running = under(runs, runs.new_directory("run"), launcher, (LONG,), tmp_path)
    running.kill(0)
    assert running.codes() == [EXIT_FAULT]


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        ([[EXIT_TRAINING, EXIT_STOPPED]], EXIT_TRAINING),
        ([[EXIT_TRAINING], [EXIT_STOPPED]], EXIT_STOPPED),
        ([[EXIT_STOPPED], [EXIT_TRAINING]], EXIT_TRAINING),
        ([[EXIT_TRAINING], []], EXIT_FAULT),
        ([[]], EXIT_FAULT),
        ([], 1),
    ],
)
def test_the_last_attempt_of_torchrun_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[list[int]], code: int
) -> None:
    file = tmp_path / "codes"
    monkeypatch.setenv(CODES_FILE, str(file))
    for number, recorded in enumerate(attempts):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        record_start()
        for each in recorded:
            record_exit_code(each)
    assert read_exit_code(file, 1) == code
    assert read_exit_code(file, EXIT_FINISHED) == EXIT_FINISHED


def test_a_code_whose_reason_is_known_outweighs_those_of_broken_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "codes"
    monkeypatch.setenv(CODES_FILE, str(file))
    record_start()
    record_exit_code(EXIT_FAULT)
    record_exit_code(EXIT_TRAINING, outweighs=True)
    record_exit_code(EXIT_FAULT)
    assert read_exit_code(file, 1) == EXIT_TRAINING
