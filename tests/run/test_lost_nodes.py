"""Runs on several nodes go on by themselves when a worker or a node is lost, and when a node comes back.

The nodes are on this machine: each is a launcher in a process group of its own, with its workers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import descendants, environment, wait_for
from tests.support.forked import Finished, Started
from tests.support.runs import ON_ROWS, TINY, Runs, column, difference, events
from trainwright.engine.event_reader import read_events

SETTINGS = (ON_ROWS, "data.validation=null", "checkpoint.every=5", "parallel.strategy=ddp")
# With a larger learning rate, training amplifies the rounding of sums.
LONG = (*SETTINGS, "train.max_steps=100", "optimizer.learning_rate=1e-6")
SLOW = "train.step_policies=['tests.support.slow_steps:SlowSteps']"
RANGE = "parallel.num_processes={min: 1, max: 2}"
TWO = "parallel.num_processes=2"


@dataclass
class Cluster:
    """Nodes of one run."""

    runs: Runs
    run: Path
    place: str
    settings: tuple[str, ...]
    nodes: int = 2

    def start(self, rank: int, *more: str) -> Started:
        """Start the command of a node, again if it has run there before."""
        fixed = (str(TINY), f"logging.run_directory={self.run}", "logging.observers.tensorboard=false", *self.settings)
        options = ("--nodes", str(self.nodes), "--rendezvous", self.place, "--node-rank", str(rank))
        node = self.runs.command("train", *fixed, *options, *more, STEP_FILE=str(self.hurry))
        node.run = self.run
        return node

    @property
    def hurry(self) -> Path:
        """The file that ends the pauses of `SLOW`."""
        return self.run.with_name(f"{self.run.name}-hurry")

    def sizes(self) -> list[int]:
        """The number of processes of each launch."""
        log = self.run / "events.jsonl"
        return [event["world_size"] for event in read_events(log) if event["event"] == "start"] if log.exists() else []

    def wait_for_size(self, *sizes: int) -> None:
        """Until the launches had these sizes, and the last one has taken a step."""
        wait_for(lambda: self.sizes() == list(sizes) and '"step"' in self._last())

    def _last(self) -> str:
        return (self.run / "events.jsonl").read_text().splitlines()[-1]


def cluster(runs: Runs, *settings: str, nodes: int = 2) -> Cluster:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    return Cluster(runs, runs.new_directory("run"), place, settings, nodes)


def ended(*nodes: Started) -> list[Finished]:
    return [node.wait() for node in nodes]


def worker_of(node: Started) -> int:
    return wait_for(lambda: [process for process in descendants(node.pid) if process.name()])[-1].pid


@pytest.mark.slow
def test_killed_workers_of_any_node_are_replaced_on_all_nodes(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS, TWO, "train.max_steps=30")
    them = cluster(runs, *SETTINGS, TWO, "train.max_steps=30")
    first, second = them.start(0), them.start(1)
    for step, node in ((3, second), (14, first)):
        first.wait_for_step(step)
        os.kill(worker_of(node), signal.SIGKILL)
    one, two = ended(first, second)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert [event["cause"] for event in events(them.run, "restart")] == ["process", "process"]
    assert "rank 1 was killed" in events(them.run, "restart")[0]["detail"]
    assert "restart 2 from the newest checkpoint" in one.stderr
    assert column(them.run, "loss") == column(undisturbed, "loss")


@pytest.mark.slow
def test_an_exception_that_repeats_at_the_same_step_ends_all_nodes_with_it(runs: Runs) -> None:
    policy = "train.step_policies=['tests.support.hanging:Failing']"
    them = cluster(runs, *SETTINGS, RANGE, policy, "train.max_steps=30")
    for finished in ended(them.start(0), them.start(1)):
        assert finished.code == 4, finished.stderr
        assert "ValueError: this step always fails" in finished.stderr
        assert "the same error happened twice after step 9" in finished.stderr
    assert [event["cause"] for event in events(them.run, "restart")] == ["error"]


@pytest.mark.slow
def test_a_run_that_loses_a_node_goes_on_without_it_and_with_it_when_it_is_back(runs: Runs) -> None:
    undisturbed = runs.trained(*LONG, TWO)
    them = cluster(runs, *LONG, RANGE, SLOW)
    first, second = them.start(0), them.start(1)
    first.wait_for_step(5)
    second.kill()
    them.wait_for_size(2, 1)
    again = them.start(1)
    them.wait_for_size(2, 1, 2)
    them.hurry.touch()
    one, two = ended(first, again)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    (restart,) = events(them.run, "restart")
    assert restart["cause"] == "node" and restart["detail"].startswith("node 1 (")
    assert difference(column(them.run, "loss"), column(undisturbed, "loss")) < 1e-5


@pytest.mark.slow
def test_a_node_that_is_frozen_is_left_behind_and_joins_again_when_it_wakes(runs: Runs) -> None:
    undisturbed = runs.trained(*LONG, TWO)
    them = cluster(runs, *LONG, RANGE, SLOW, "faults.on_hang=restart")
    first, second = them.start(0), them.start(1)
    first.wait_for_step(5)
    second.kill(signal.SIGSTOP)
    them.wait_for_size(2, 1)
    second.kill(signal.SIGCONT)
    them.wait_for_size(2, 1, 2)
    them.hurry.touch()
    one, two = ended(first, second)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert "has not answered for 30 s" in events(them.run, "restart")[0]["detail"]
    assert "joining them again" in two.stderr
    assert difference(column(them.run, "loss"), column(undisturbed, "loss")) < 1e-5


@pytest.mark.slow
def test_a_node_that_is_frozen_for_a_while_is_waited_for_by_default(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS, TWO, "train.max_steps=30")
    them = cluster(runs, *SETTINGS, TWO, "train.max_steps=30")
    first, second = them.start(0), them.start(1)
    first.wait_for_step(5)
    second.kill(signal.SIGSTOP)
    wait_for(lambda: "warning: node 1" in (first.files / "stderr").read_text())
    second.kill(signal.SIGCONT)
    one, two = ended(first, second)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert "node 1" in one.stderr and "answers again" in one.stderr
    assert not events(them.run, "restart")
    assert column(them.run, "loss") == column(undisturbed, "loss")


@pytest.mark.slow
def test_a_suspended_worker_of_another_node_is_killed_and_the_run_goes_on(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS, TWO, "train.max_steps=30")
    them = cluster(runs, *SETTINGS, TWO, "train.max_steps=30", "faults.on_hang=restart")
    first, second = them.start(0), them.start(1)
    first.wait_for_step(5)
    os.kill(worker_of(second), signal.SIGSTOP)
    one, two = ended(first, second)
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert [event["cause"] for event in events(them.run, "restart")] == ["hang"]
    assert "rank 1 has been suspended" in events(them.run, "fault")[0]["detail"]
    assert column(them.run, "loss") == column(undisturbed, "loss")


@pytest.mark.slow
def test_without_node_0_the_others_end_with_5_and_resume(runs: Runs) -> None:
    undisturbed = runs.trained(*LONG, TWO)
    them = cluster(runs, *LONG, RANGE, SLOW)
    first, second = them.start(0), them.start(1)
    first.wait_for_step(7)
    first.kill()
    (two,) = ended(second)
    assert two.code == 5
    assert "node 0 (" in two.stderr and "is gone" in two.stderr and "Traceback" not in two.stderr
    resumed = runs.resumed(them.run)
    assert difference(column(resumed, "loss"), column(undisturbed, "loss")) < 1e-5


@pytest.mark.slow
def test_kills_beyond_the_limit_end_all_nodes(runs: Runs) -> None:
    them = cluster(runs, *SETTINGS, TWO, "train.max_steps=5000", "faults.restarts=1 per hour")
    first, second = them.start(0), them.start(1)
    for step in (3, 12):
        first.wait_for_step(step)
        os.kill(worker_of(second), signal.SIGKILL)
    for finished in ended(first, second):
        assert finished.code == 5
        assert "rank 1 was killed" in finished.stderr and "faults.restarts allows 1 per hour" in finished.stderr


@pytest.mark.slow
def test_a_run_begins_without_a_node_that_does_not_come(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS, TWO, "train.max_steps=30")
    them = cluster(runs, *SETTINGS, "parallel.num_processes={min: 2, max: 3}", "train.max_steps=30", nodes=3)
    one, two = ended(*(them.start(node, "--rendezvous-timeout", "20") for node in (0, 2)))
    assert (one.code, two.code) == (0, 0), one.stderr + two.stderr
    assert them.sizes() == [2]
    assert column(them.run, "loss") == column(undisturbed, "loss")


@pytest.mark.slow
def test_a_stop_ends_the_nodes_that_wait_too(runs: Runs) -> None:
    # 3 processes are too many for the global batch, so a node waits.
    them = cluster(runs, *SETTINGS, "parallel.num_processes={min: 1, max: 3}", "train.global_batch_size=2", nodes=3)
    nodes = [them.start(node) for node in range(3)]
    nodes[0].wait_for_step(3)
    nodes[2].kill(signal.SIGTERM)
    assert [finished.code for finished in ended(*nodes)] == [75, 75, 75]


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[list[str], list[str], str]]:
    """Commands that run something on either of two machines with a cable between them, and what cuts the cable."""
    one, two = (f"trainwright-{os.getpid()}-{i}" for i in range(2))
    ends = f"tw{os.getpid() % 10**6}a", f"tw{os.getpid() % 10**6}b"
    made = [
        ["ip", "netns", "add", one],
        ["ip", "netns", "add", two],
        ["ip", "link", "add", ends[0], "netns", one, "type", "veth", "peer", "name", ends[1], "netns", two],
        *(["ip", "-n", space, "link", "set", "lo", "up"] for space in (one, two)),
        *(["ip", "-n", space, "link", "set", end, "up"] for space, end in zip((one, two), ends, strict=True)),
        ["ip", "-n", one, "addr", "add", "10.83.19.1/24", "dev", ends[0]],
        ["ip", "-n", two, "addr", "add", "10.83.19.2/24", "dev", ends[1]],
    ]
    try:
        for command in made:
            if subprocess.run(command, capture_output=True).returncode:
                pytest.skip(f"this machine does not allow `{' '.join(command)}`")
        yield (["ip", "netns", "exec", one], ["ip", "netns", "exec", two], f"ip -n {two} link set {ends[1]} down")
    finally:
        for space in (one, two):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_a_machine_that_vanishes_from_the_network_is_left_behind(runs: Runs, tmp_path: Path) -> None:
    """No connection is reset: what is sent to the machine gets no answer."""
    undisturbed, run = runs.trained(*LONG, TWO), tmp_path / "run"
    fixed = [str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *LONG, RANGE, SLOW]
    words = ["-m", "trainwright", "train", *fixed, "--nodes=2", "--rendezvous=10.83.19.1:29811"]
    variables = environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache"), STEP_SECONDS="0.3")
    them = Cluster(runs, run, "", ())
    with two_networks() as (*machines, cut), contextlib.ExitStack() as stack:
        nodes = []
        for index, machine in enumerate(machines):
            out = stack.enter_context((tmp_path / f"node-{index}").open("w"))
            command = [*machine, sys.executable, *words, f"--node-rank={index}"]
            nodes.append(subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True))
        try:
            them.wait_for_size(2)
            subprocess.run(cut.split(), check=True)
            told = [(tmp_path / f"node-{index}", node.wait(400)) for index, node in enumerate(nodes)]
        finally:
            for node in nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
    assert [code for _, code in told] == [0, 5], [file.read_text() for file, _ in told]
    assert them.sizes() == [2, 1]
    assert "node 0" in told[1][0].read_text()
    assert difference(column(run, "loss"), column(undisturbed, "loss")) < 1e-5
