"""Several nodes with our own launcher: two of them on this machine, meeting at a port of the loopback interface."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.support.commands import descendants, wait_for
from tests.support.runs import TINY, Finished, Runs, Started, column, difference, events

STEPS = "train.max_steps=6"
LONG = "train.max_steps=5000"


@pytest.fixture
def place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def start(runs: Runs, place: str, *arguments: str, ranks: tuple[int, ...] = (0, 1), nodes: int = 2) -> list[Started]:
    run = runs.new_directory("run")
    fixed = (str(TINY), f"logging.run_directory={run}", "logging.observers.tensorboard=false", *arguments)
    options = ("--nodes", str(nodes), "--rendezvous", place)
    begun = [runs.command("train", *fixed, *options, "--node-rank", str(rank)) for rank in ranks]
    for each in begun:
        each.run = run
    return begun


def ended(nodes: list[Started]) -> list[Finished]:
    return [node.wait() for node in nodes]


@pytest.mark.slow
def test_two_nodes_are_the_same_run_over_ipv6(runs: Runs) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            place = f"[::1]:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("no IPv6 here")
    test_two_nodes_are_the_same_run(runs, place)


def test_two_nodes_are_the_same_run(runs: Runs, place: str) -> None:
    nodes = start(runs, place, STEPS, "--num-processes", "2")
    first, second = ended(nodes)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    run, reference = nodes[0].run, runs.trained("parallel.num_processes=2", STEPS)
    assert run is not None
    assert difference(column(run, "loss"), column(reference, "loss")) < 1e-6
    assert difference(column(run, "grad_norm"), column(reference, "grad_norm")) < 1e-6
    assert "finished at step 6" in first.stdout
    assert (second.stdout, second.stderr) == ("", "")
    assert {"rank-0.log", "rank-1.log"} <= {path.name for path in (run / "logs").iterdir()}


@pytest.mark.slow
def test_ranks_follow_the_node_ranks_and_auto_counts_all_nodes(runs: Runs, place: str) -> None:
    nodes = start(runs, place, STEPS)
    first, second = ended(nodes)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert nodes[0].run is not None
    plan = json.loads((nodes[0].run / "plan.json").read_text())
    assert plan["machine"].startswith("2x1x")
    assert plan["chosen"]["num_processes"] == events(nodes[0].run, "start")[0]["world_size"] >= 2


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        pytest.param((0,), "nodes 1, 2", marks=pytest.mark.slow),
        ((1,), "node 0"),
        pytest.param((0, 1), "node 2", marks=pytest.mark.slow),
    ],
)
def test_nodes_that_do_not_come_are_named(runs: Runs, place: str, present: tuple[int, ...], missing: str) -> None:
    nodes = start(runs, place, "--num-processes", "3", "--rendezvous-timeout", "3", ranks=present, nodes=3)
    for finished in ended(nodes):
        assert finished.code == 3, finished.stderr
        assert missing in finished.stderr and "3 s" in finished.stderr
    assert nodes[0].run is not None and not nodes[0].run.exists()


def test_a_taken_port_is_named(runs: Runs, taken: str) -> None:
    (finished,) = ended(start(runs, taken, "--num-processes", "2", ranks=(0,)))
    assert finished.code == 3
    assert taken.partition(":")[2] in finished.stderr and "--rendezvous" in finished.stderr


def test_node_0_on_another_machine_than_it_says_is_refused(runs: Runs) -> None:
    (finished,) = ended(start(runs, "192.0.2.1:29511", "--num-processes", "2", ranks=(0,)))
    assert finished.code == 3
    assert "192.0.2.1 is not an address of this machine" in finished.stderr


def test_nodes_with_different_recipes_are_refused(runs: Runs, place: str) -> None:
    one = start(runs, place, STEPS, "--num-processes", "2", ranks=(0,))
    two = start(runs, place, "train.max_steps=7", "--num-processes", "2", ranks=(1,))
    for finished in ended([*one, *two]):
        assert finished.code == 2 and "node 1" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--nodes", "2", "--node-rank", "0"), "--rendezvous"),
        (("--nodes", "2", "--rendezvous", "a:1"), "--node-rank"),
        (("--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"), "the last is 1"),
        (("--nodes", "2", "--node-rank", "0", "--rendezvous", "a"), "host:port"),
        (("--nodes", "2", "--node-rank", "0", "--rendezvous", "fd00::1"), r"[fd00::1]:29500 with IPv6"),
        (("--rendezvous", "a:1"), "--nodes"),
        (("--node-rank", "1"), "--nodes"),
        (("--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--num-processes", "3"), "cannot be divided"),
        (
            ("--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "parallel.strategy=single"),
            "parallel.strategy",
        ),
        (
            ("--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "parallel.num_processes={min: 1, max: 3}"),
            "set max to 2",
        ),
        (("--num-processes", "2", "parallel.num_processes=3"), "contradicts"),
        (("--num-processes", "2", "parallel.strategy=single"), "parallel.strategy"),
    ],
)
def test_options_that_contradict_are_refused(runs: Runs, arguments: tuple[str, ...], named: str) -> None:
    finished = runs.command("train", str(TINY), *arguments).wait()
    assert finished.code == 2, finished.stderr
    assert named in finished.stderr and "Traceback" not in finished.stderr


def test_num_processes_is_short_for_the_key(runs: Runs) -> None:
    finished = runs.command("train", str(TINY), "--num-processes", "2", "--dry-run").wait()
    assert finished.code == 0 and "num_processes: 2" in finished.stdout


def test_a_stop_signal_on_any_node_stops_all_after_a_checkpoint(runs: Runs, place: str) -> None:
    nodes = start(runs, place, LONG, "--num-processes", "2")
    nodes[0].wait_for_step(3)
    psutil.Process(nodes[1].pid).send_signal(signal.SIGTERM)
    first, second = ended(nodes)
    assert (first.code, second.code) == (75, 75), first.stderr + second.stderr
    assert nodes[0].run is not None and list((nodes[0].run / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.slow
def test_a_node_that_dies_ends_the_others(runs: Runs, place: str) -> None:
    nodes = start(runs, place, LONG, "--num-processes", "2")
    nodes[0].wait_for_step(3)
    psutil.Process(nodes[1].pid).kill()
    first = nodes[0].wait()
    assert first.code == 5 and "node 1" in first.stderr and "is gone" in first.stderr, first.stderr
    assert "Traceback" not in first.stderr


@pytest.mark.slow
def test_node_0_that_dies_ends_the_others(runs: Runs, place: str) -> None:
    nodes = start(runs, place, LONG, "--num-processes", "2")
    nodes[0].wait_for_step(3)
    psutil.Process(nodes[0].pid).kill()
    second = nodes[1].wait()
    assert second.code == 5 and "node 0" in second.stderr and "is gone" in second.stderr, second.stderr


@pytest.mark.slow
def test_a_worker_that_dies_is_the_first_error_on_all_nodes(runs: Runs, place: str) -> None:
    nodes = start(runs, place, LONG, "--num-processes", "2", "faults.restarts=off")
    nodes[0].wait_for_step(3)
    workers = wait_for(lambda: [worker for worker in descendants(nodes[1].pid) if worker.name()])
    workers[-1].kill()
    first, second = ended(nodes)
    assert (first.code, second.code) == (5, 5)
    for finished in (first, second):
        assert finished.stderr.startswith("error: rank 1 was killed"), finished.stderr
