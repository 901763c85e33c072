"""Hangs of runs on several machines, and of runs whose workers another launcher has started."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.commands import environment, wait_for
from tests.support.runs import ON_ROWS, TINY, Runs, Started, events
from trainwright.errors import TrainingError
from trainwright.faults.hangs import judge as judging
from trainwright.faults.hangs.evidence import keep_collectives, remove_pipes, wait_for_collectives, write_collectives
from trainwright.faults.hangs.judge import Machines, RankState, judge
from trainwright.faults.hangs.watcher import _list_workers, watch_run
from trainwright.parallel.world import RankInfo
from trainwright.utils.heartbeat import (
    FINISHED,
    PID,
    Beat,
    EnteredCollective,
    Heartbeat,
    Times,
    build_heartbeat_path,
    create_heartbeat_directory,
    read,
)

HANG = "train.step_policies=['tests.support.hanging:Hanging']"
OVERRIDES = (
    "logging.observers.tensorboard=false",
    ON_ROWS,
    "data.validation=8",
    "train.max_steps=12",
    "train.global_batch_size=4",
)
PATIENCE = 200


def seen(pid: int, entered: int, quiet: float, phase: str = "data", waiting: bool = False) -> RankState:
    call = EnteredCollective(entered, "all_reduce", "float32[8]", "engine/trainer.py:1", same_shape=True)
    times = {"data": Times(9, 0.5)}
    return RankState(Beat(pid, 0.0, 100, entered, waiting, 4, 0, phase, call, times, {entered: call}), quiet)


def both(run: Path) -> tuple[Machines, Machines]:
    return Machines(run, 2, decides=True), Machines(run, 2, decides=False)


def test_the_watcher_of_rank_0_decides_from_what_all_machines_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(judging, "_STACKS_SECONDS", 0.3)
    one, two = both(tmp_path)
    waits, late = seen(11, 8, 20.0, "forward", waiting=True), seen(22, 7, 20.0)
    assert one.exchange_reports({0: waits}) is None, "the other machine may make progress"
    assert two.exchange_reports({1: late}) is None, "only rank 0's machine decides"
    found = one.exchange_reports({0: waits})
    assert found == {0: waits, 1: late}
    verdict = judge(found)
    assert verdict is not None and (verdict.ranks, verdict.phase) == ((1,), "data")
    assert two.read_decision({1: 22}) is None
    one.decide(verdict, found)
    assert two.read_decision({1: 22}) == verdict
    assert two.read_decision({1: 23}) is None, "a process of a later launch"
    two.give({1: "File x"})
    assert one.stacks(frozenset({1})) == {1: "File x"}
    one.decide(None, {})
    assert two.read_decision({1: 22}) is None
    two.close()
    one.close()
    assert not (tmp_path / "logs" / "hangs").exists()


@pytest.mark.parametrize("ends", [False, True])
def test_stacks_of_other_machines_are_there_until_the_watcher_of_rank_0_has_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(judging, "_PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(judging, "_STACKS_SECONDS", 0.3)
    one, two = both(tmp_path)
    waits, late = seen(11, 8, 20.0, "forward", waiting=True), seen(22, 7, 20.0)
    two.exchange_reports({1: late})
    found = one.exchange_reports({0: waits})
    assert found is not None
    one.decide(judge(found), found)
    assert two.read_decision({1: 22}) is not None
    two.give({1: "File x"})
    if ends:
        two.close()
    else:
        two.exchange_reports({1: late})
    assert one.stacks(frozenset({1})) == {1: "File x"}
    if not ends:
        one.decide(None, {})
        assert two.read_decision({1: 22}) is None
        two.exchange_reports({1: late})
        assert Machines(tmp_path, 2, decides=False).stacks(frozenset({1})) == {}, "of another hang"
        two.close()
    one.close()
    assert not (tmp_path / "logs" / "hangs").exists()


def test_a_machine_that_closes_after_the_decision_is_gone_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_PUBLISH_SECONDS", 0.0)
    one, two = both(tmp_path)
    two.exchange_reports({1: seen(22, 7, 20.0)})
    one.close()
    two.give({1: "File x"})
    two.close()
    assert not (tmp_path / "logs" / "hangs").exists()


def test_a_machine_that_makes_progress_or_reports_no_more_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "_PUBLISH_SECONDS", 0.0)
    one, two = both(tmp_path)
    two.exchange_reports({1: seen(22, 7, 20.0)})
    two.exchange_reports({1: seen(22, 7, 0.5)})  # it goes on
    assert one.exchange_reports({0: seen(11, 8, 20.0)}) is None
    two.exchange_reports({1: seen(22, 7, 20.0, FINISHED)})
    assert one.exchange_reports({0: seen(11, 8, 20.0)}) is not None
    monkeypatch.setattr(judging, "_FRESH", 0.0)
    assert one.exchange_reports({0: seen(11, 8, 20.0)}) is None


def test_heartbeats_that_a_killed_job_has_left_are_not_those_of_processes_with_the_same_pids(tmp_path: Path) -> None:
    directory = create_heartbeat_directory(tmp_path)
    assert directory is not None
    try:
        for rank in (0, 1, 7):
            Heartbeat(build_heartbeat_path(directory, rank))
        assert _list_workers(tmp_path, 8) == dict.fromkeys((0, 1, 7), os.getpid())
        assert _list_workers(tmp_path, 4) == dict.fromkeys((0, 1), os.getpid())
        time.sleep(2.1)
        with subprocess.Popen(["sleep", "60"]) as other:
            file = build_heartbeat_path(directory, 1)
            data = bytearray(file.read_bytes())
            memoryview(data).cast("q")[PID] = other.pid
            file.write_bytes(data)
            assert _list_workers(tmp_path, 8) == dict.fromkeys((0, 7), os.getpid())
            other.kill()
        assert _list_workers(tmp_path, 8) == dict.fromkeys((0, 7), os.getpid())
    finally:
        shutil.rmtree(directory)


def test_a_failure_is_explained_by_different_collectives(tmp_path: Path) -> None:
    directory = create_heartbeat_directory(tmp_path)
    assert directory is not None
    workers = [Heartbeat(build_heartbeat_path(directory, rank)) for rank in range(2)]
    second = RankInfo(rank=1, size=2, local_rank=1, local_size=2, gpu=0)
    try:
        for own in workers:
            own.enter("all_reduce", "float32[3]", "a.py:1", counted=True, same_shape=True)
        with pytest.raises(RuntimeError, match="closed by peer"), watch_run(tmp_path, second, sys.stderr):
            raise RuntimeError("Connection closed by peer")
        for own, size in zip(workers, (3, 9), strict=True):
            own.enter("all_reduce", f"float32[{size}]", "b.py:2", counted=True, same_shape=True)
        with pytest.raises(TrainingError) as found, watch_run(tmp_path, second, sys.stderr):
            raise RuntimeError("Connection closed by peer")
    finally:
        shutil.rmtree(directory)
    assert "all_reduce of float32[3] at b.py:2" in str(found.value)
    assert "all_reduce of float32[9] at b.py:2" in str(found.value)
    assert "RuntimeError: Connection closed by peer" in str(found.value)


def test_what_an_earlier_launch_has_left_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_PUBLISH_SECONDS", 0.0)
    _, two = both(tmp_path)
    two.exchange_reports({1: seen(22, 7, 2000.0)})
    assert both(tmp_path)[0].exchange_reports({0: seen(11, 8, 20.0)}) is None


def test_collectives_are_asked_for_through_the_pipes_that_torch_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    keep_collectives(tmp_path / "logs", tmp_path)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/logs/nccl-rank-"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", "the user's"
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}1.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    logs = tmp_path / "logs"
    asked = write_collectives(tmp_path, [0, 1], logs)
    assert asked == {1: 0} and os.read(reader, 8) == b"1\n"
    logs.mkdir()
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; echo whole > {shlex.quote(str(logs))}/nccl-rank-1"]):
        wait_for_collectives(logs, asked)
        assert (logs / "nccl-rank-1").read_text() == "whole\n"
    os.close(reader)
    assert write_collectives(tmp_path, [1], logs) == {}  # nobody reads it any more
    wait_for_collectives(logs, {})
    shutil.rmtree(logs)
    remove_pipes(tmp_path, [0, 1])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("suspended", [False, True])
def test_a_rank_of_another_node_is_named_with_its_stack(runs: Runs, suspended: bool) -> None:
    run = runs.new_directory("run")
    hang = "none:0:0" if suspended else "data:1:4"
    steps = ("train.max_steps=100000",) if suspended else ()
    place = ("--nodes", "2", "--num-processes", "2", "--rendezvous", f"127.0.0.1:{_port()}")
    nodes: list[Started] = [
        runs.command(
            *("train", str(TINY), f"logging.run_directory={run}", *OVERRIDES, HANG, "faults.on_hang=stop", *steps),
            *(*place, "--node-rank", str(node)),
            HANG=hang,
            HANG_SECONDS="600",
        )
        for node in range(2)
    ]
    if suspended:
        wait_for(lambda: (run / "events.jsonl").exists() and '"event": "step"' in (run / "events.jsonl").read_text())
        os.kill(_worker(run, 1), signal.SIGSTOP)
    first, second = (node.wait() for node in nodes)
    assert (first.code, second.code) == (5, 5), first.stderr + second.stderr
    (fault,) = events(run, "fault")
    assert (fault["kind"], fault["rank"], fault["action"]) == ("hang", 1, "stop")
    if suspended:
        assert "rank 1 has been suspended by a signal" in first.stderr
        # It may have been suspended inside the collective that rank 0 waits in.
        assert re.search(r"rank 0 (has entered \w+.*which rank 1 has not|waits in \w+)", first.stderr)
    else:
        assert "in phase data of step 4" in first.stderr and "in _hang" in first.stderr
        assert re.search(r"rank 0 has entered \w+.*which rank 1 has not", first.stderr)
    assert not (run / "logs" / "hangs").exists()


@pytest.mark.slow
def test_a_hang_under_torchrun_is_named_and_ends_the_run(tmp_path: Path, runs: Runs) -> None:
    run = tmp_path / "run"
    ended = under_torchrun(run, runs, "faults.on_hang=stop", HANG="data:1:4")
    assert ended.returncode == 5, ended.stderr
    assert "the run hangs: rank 1 has made no progress" in ended.stderr and "in _hang" in ended.stderr
    (fault,) = events(run, "fault")
    assert (fault["kind"], fault["rank"]) == ("hang", 1)
    wait_for(
        lambda: not any(str(run) in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tensor"), [("order", r"broadcast of float32\[5\]"), ("shape", r"all_reduce of float32\[1000000\]")]
)
def test_different_collectives_under_torchrun_are_named_and_would_occur_again(
    tmp_path: Path, runs: Runs, kind: str, tensor: str
) -> None:
    """Some make the run hang, and others break its connections at once."""
    ended = under_torchrun(tmp_path / "run", runs, "faults.on_hang=stop", HANG=f"{kind}:1:4")
    assert ended.returncode == 4, ended.stderr
    line = r"at \S+/hanging\.py:\d+"
    calls = {rf"all_reduce of float32\[3\] {line}", rf"{tensor} {line}"}
    named = [rf"rank [01] has entered {one}, and rank [01] {other}" for one, other in itertools.permutations(calls)]
    assert any(re.search(pattern, ended.stderr) for pattern in named), ended.stderr


@pytest.mark.slow
def test_a_warning_under_torchrun_does_not_offer_a_restart(tmp_path: Path, runs: Runs) -> None:
    ended = under_torchrun(tmp_path / "run", runs, HANG="data:1:4", HANG_SECONDS="14")
    assert ended.returncode == 0, ended.stderr
    assert "it goes on; faults.on_hang: stop would end it with exit code 5" in ended.stderr


def under_torchrun(run: Path, runs: Runs, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "trainwright", "under", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    arguments = ["-m", "trainwright.worker", str(TINY), f"logging.run_directory={run}", *OVERRIDES, HANG, *overrides]
    return subprocess.run(
        [sys.executable, *torchrun, *arguments],
        env=environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache"), **variables),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def _worker(run: Path, rank: int) -> int:
    directory = create_heartbeat_directory(run)
    assert directory is not None
    beat = read(build_heartbeat_path(directory, rank))
    while beat is None:
        time.sleep(0.05)
        beat = read(build_heartbeat_path(directory, rank))
    return beat.pid


def _port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
