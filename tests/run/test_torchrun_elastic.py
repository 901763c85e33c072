"""Runs under torchrun that restart and change their size: `--max-restarts`, `--nnodes=1:2`, `--resume auto`."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.commands import PATIENCE, descendants, environment, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, column, difference
from trainwright.engine.event_reader import read_log

pytestmark = pytest.mark.slow

LONG = (ON_ROWS, "data.validation=null", "checkpoint.every=5", "train.max_steps=100", "optimizer.learning_rate=1e-6")
SLOW = "tests.support.slow_steps:SlowSteps"
SLOW_SECONDS = "0.3"


@dataclass
class Agents:
    """Torchrun's agents of one run, each in a process group of its own."""

    directory: Path
    cache: Path
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    policy: str = SLOW

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start an agent; its workers end with it."""
        with (self.directory / "output").open("ab") as out:
            words = [
                *LONG,
                *self.overrides,
                f"train.step_policies=['{self.policy}']",
                "logging.observers.tensorboard=false",
            ]
            words.append(f"logging.run_directory={self.run}")
            launcher = ["-m", "trainwright", "under", sys.executable, "-m", "torch.distributed.run", *self.options]
            variables = {"STEP_FILE": str(self.directory / "hurry"), "STEP_SECONDS": SLOW_SECONDS}
            agent = subprocess.Popen(
                [sys.executable, *launcher, "-m", "trainwright.worker", str(TINY), *words, "--resume", "auto"],
                env=environment(TRAINWRIGHT_CACHE=str(self.cache), **variables),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            yield agent
        finally:
            kill(agent)

    def wait_for_size(self, size: int, launches: int = 1) -> None:
        """Until a launch of this size, after others, has taken two steps."""
        log = self.run / "events.jsonl"

        def reached() -> bool:
            found = read_log(log).everything if log.exists() else []
            starts = [event["world_size"] for event in found if event["event"] == "start"]
            steps = [event["event"] for event in found[-2:]] == ["step", "step"]
            return len(starts) >= launches and starts[-1] == size and steps

        wait_for(reached)

    def hurry(self) -> None:
        """End the pauses after steps."""
        (self.directory / "hurry").touch()

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()


def kill(agent: subprocess.Popen[bytes]) -> None:
    """End an agent with its workers at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(agent.pid), *descendants(agent.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    agent.wait(PATIENCE)


def worker(agent: subprocess.Popen[bytes], rank: int) -> psutil.Process:
    """The worker of a rank."""
    return next(each for each in descendants(agent.pid) if _rank(each) == str(rank))


def _rank(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        if "trainwright.worker" in process.cmdline() and "-c" not in process.cmdline():
            return process.environ().get("RANK")
    return None


def test_a_killed_worker_is_replaced_within_the_restarts_of_torchrun(runs: Runs, tmp_path: Path) -> None:
    undisturbed = runs.trained(*LONG, "parallel.num_processes=2")
    agents = Agents(tmp_path, runs.directory / "cache", ("--nproc-per-node=2", "--max-restarts=2"), ())
    with agents.started() as agent:
        agents.wait_for_size(2)
        worker(agent, 1).kill()
        agents.wait_for_size(2, launches=2)
        agents.hurry()
        assert agent.wait(PATIENCE) == 0, agents.output
    assert column(agents.run, "loss") == column(undisturbed, "loss")


def test_a_stop_is_not_undone_by_the_restarts_of_torchrun(runs: Runs, tmp_path: Path) -> None:
    agents = Agents(tmp_path, runs.directory / "cache", ("--nproc-per-node=2", "--max-restarts=1"), ())
    with agents.started() as agent:
        agents.wait_for_size(2)
        (agents.run / "stop").touch()
        assert agent.wait(PATIENCE) == 75, agents.output
    kinds = [event["event"] for event in read_log(agents.run / "events.jsonl").everything]
    assert kinds.count("start") == 1 and kinds[-2:] == ["checkpoint", "finish"]
    assert "stopped before the next step: asked by" in agents.output


def test_a_run_goes_on_with_the_nodes_that_are_there(runs: Runs, tmp_path: Path) -> None:
    undisturbed = runs.trained(*LONG, "parallel.num_processes=2")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7")
    soon = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *place, soon)
    agents = Agents(tmp_path, runs.directory / "cache", options, ("parallel.num_processes={min: 1, max: 2}",))
    with agents.started() as first:
        wait_for(lambda: _listens(port))
        with agents.started() as second:
            agents.wait_for_size(2)
            kill(second)
            agents.wait_for_size(1)
        with agents.started() as again:
            agents.wait_for_size(2)
            agents.hurry()
            assert (first.wait(PATIENCE), again.wait(PATIENCE)) == (0, 0), agents.output
    assert difference(column(agents.run, "loss"), column(undisturbed, "loss")) < 1e-5


def test_what_fails_again_after_a_restart_ends_with_the_code_of_the_run(runs: Runs, tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--max-restarts=1")
    agents = Agents(tmp_path, runs.directory / "cache", options, (), policy="tests.support.hanging:Failing")
    with agents.started() as agent:
        assert agent.wait(PATIENCE) == 4, agents.output
    assert "ValueError: this step always fails" in agents.output
    kinds = [event["event"] for event in read_log(agents.run / "events.jsonl").everything]
    assert kinds.count("start") == 2


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False
