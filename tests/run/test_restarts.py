"""A run whose worker is killed, crashes or hangs is restarted from its newest checkpoint; other failures end it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.commands import descendants, wait_for
from tests.support.forked import Started
from tests.support.ledgers import whole_ledger
from tests.support.runs import ON_ROWS, Runs, column, events
from trainwright.engine.events import Restart
from trainwright.errors import EXIT_FAULT, EXIT_TRAINING
from trainwright.run.relaunch import Restarts
from trainwright.run.shutdown.failure import Cause, Failure
from trainwright.utils.heartbeat import build_heartbeat_path, create_heartbeat_directory, read

SETTINGS = ("parallel.num_processes=2", ON_ROWS, "data.validation=null", "train.max_steps=40", "checkpoint.every=4")


def kill(started: Started, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the worker of a rank, once the current launch has written its heartbeat."""
    run = started.run
    assert run is not None

    def worker() -> int | None:
        directory = create_heartbeat_directory(run)
        beat = None if directory is None else read(build_heartbeat_path(directory, rank))
        if beat is None or beat.pid not in [process.pid for process in descendants(started.pid)]:
            return None
        return beat.pid

    pid = wait_for(worker)
    assert pid is not None
    os.kill(pid, number)


def test_killed_workers_are_replaced_and_the_losses_are_those_of_the_undisturbed_run(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS)
    started = runs.train(*SETTINGS)
    for step, rank in ((3, 1), (14, 0), (26, 1)):
        started.wait_for_step(step)
        kill(started, rank)
    ended = started.wait()
    assert ended.code == 0, ended.stderr
    run = started.run
    assert run is not None
    assert [event["number"] for event in events(run, "restart")] == [1, 2, 3]
    assert "restart 3 from the newest checkpoint (faults.restarts: 3 per hour)" in ended.stderr
    assert column(run, "loss") == column(undisturbed, "loss")
    ledger = whole_ledger(run, ranks=2)
    assert [rank.lines[-1].launch for rank in ledger] == [4, 4]
    for rank in ledger:
        assert {"forward", "backward", "exchange", "stopped", "start: imports"} <= rank.seconds.keys()


def test_kills_beyond_the_limit_end_the_run_with_the_last_failure(runs: Runs) -> None:
    started = runs.train(*SETTINGS, "train.max_steps=5000", "faults.restarts=1 per hour")
    for step in (3, 12):
        started.wait_for_step(step)
        kill(started, 1)
    ended = started.wait()
    assert ended.code == 5
    assert "rank 1 was killed by an external SIGKILL" in ended.stderr
    assert "faults.restarts allows 1 per hour" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("off", ["0", "off"])
def test_restarts_can_be_turned_off(runs: Runs, off: str) -> None:
    started = runs.train(*SETTINGS, "train.max_steps=5000", f"faults.restarts={off}")
    started.wait_for_step(3)
    kill(started, 1)
    assert started.wait().code == 5
    assert started.run is not None
    assert not events(started.run, "restart")


def test_an_exception_that_repeats_at_the_same_step_ends_the_run_with_that_exception(runs: Runs) -> None:
    policy = "train.step_policies=['tests.support.hanging:Failing']"
    ended = (started := runs.train(*SETTINGS, policy)).wait()
    assert ended.code == 4
    assert "ValueError: this step always fails" in ended.stderr
    assert "the same error happened twice after step" in ended.stderr
    assert started.run is not None
    assert [event["cause"] for event in events(started.run, "restart")] == ["error"]


@pytest.mark.slow
def test_a_suspended_worker_is_killed_and_the_run_goes_on(runs: Runs) -> None:
    undisturbed = runs.trained(*SETTINGS)
    started = runs.train(*SETTINGS, "faults.on_hang=restart")
    started.wait_for_step(5)
    kill(started, 1, signal.SIGSTOP)
    ended = started.wait()
    assert ended.code == 0, ended.stderr
    assert started.run is not None
    assert [event["cause"] for event in events(started.run, "restart")] == ["hang"]
    assert column(started.run, "loss") == column(undisturbed, "loss")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def at(step: int, log: Path, clock: list[float]) -> None:
    with log.open("a") as file:
        file.write(f'{{"event": "step", "step": {step}, "time": {clock[0]}, "loss": 1.0, "step_time": 1.0}}\n')


def test_the_same_error_at_the_same_step_ends_the_run_and_at_another_step_does_not(log: Path) -> None:
    clock = [100.0]
    restarts = Restarts(log.parent, "9 per hour", lambda: clock[0])
    error = Failure("rank 1 failed\nTraceback\n  File x\nValueError: a bad row", 4, cause=Cause.ERROR)
    at(7, log, clock)
    assert isinstance(restarts.decide(error), Restart)
    clock[0] += 10
    at(9, log, clock)
    assert isinstance(restarts.decide(error), Restart)
    clock[0] += 10
    at(7, log, clock)
    refused = restarts.decide(error)
    assert isinstance(refused, Failure) and "the same error happened twice after step 7" in refused.message


def test_a_crash_that_repeats_is_not_the_machines(log: Path) -> None:
    restarts = Restarts(log.parent, "9 per hour")

    def crash(rank: int, name: str = "SIGSEGV") -> Failure:
        message = f"rank {rank} crashed in native code ({name}); see the end of its log"
        return Failure(message, EXIT_FAULT, cause=Cause.CRASH)

    assert isinstance(restarts.decide(crash(1)), Restart)
    assert isinstance(restarts.decide(crash(1, "SIGBUS")), Restart)
    again = restarts.decide(crash(0))
    assert isinstance(again, Failure) and again.exit_code == EXIT_TRAINING


def test_the_same_different_collectives_are_recognized_whatever_their_numbers_and_ranks(log: Path) -> None:
    clock = [100.0]
    restarts = Restarts(log.parent, "9 per hour", lambda: clock[0])

    def different(number: int, one: int, other: int, line: str = "b.py:9") -> Failure:
        calls = f"rank {one} has entered all_reduce of float32[3] at a.py:1, and rank {other} broadcast at {line}"
        text = f"the ranks have entered different collectives: as number {number}, {calls}"
        return Failure(f"{text}\nrank {one} lost its connection: port {number}", EXIT_TRAINING, cause=Cause.ERROR)

    at(7, log, clock)
    assert isinstance(restarts.decide(different(90, 0, 1)), Restart)
    for again in (different(31, 1, 0, "c.py:9"), different(32, 0, 1)):
        clock[0] += 10
        at(7, log, clock)
        found = restarts.decide(again)
    assert isinstance(found, Failure) and "the same error happened twice after step 7" in found.message


def test_lost_nodes_are_counted_but_never_compared(log: Path) -> None:
    restarts = Restarts(log.parent, "2 per hour")
    lost = Failure("node 1 (b) is gone", EXIT_FAULT, cause=Cause.NODE)
    for _ in range(2):
        assert isinstance(restarts.decide(lost), Restart)
    found = restarts.decide(lost)
    assert isinstance(found, Failure) and found.exit_code == EXIT_FAULT and "allows 2 per hour" in found.message


def test_kills_at_one_step_are_counted_but_never_compared(log: Path) -> None:
    clock = [100.0]
    restarts = Restarts(log.parent, "2 per hour", lambda: clock[0])
    killed = Failure("rank 1 was killed by an external SIGKILL", EXIT_FAULT, cause=Cause.PROCESS)
    for _ in range(2):
        at(7, log, clock)
        assert isinstance(restarts.decide(killed), Restart)
    refused = restarts.decide(killed)
    assert isinstance(refused, Failure) and refused.exit_code == EXIT_FAULT
    clock[0] += 3601
    assert isinstance(restarts.decide(killed), Restart)


@pytest.mark.parametrize("cause", [Cause.HANG, Cause.CONNECTION, Cause.PROCESS])
def test_a_fault_is_not_retried_for_ever_where_no_restart_gets_a_step_further(log: Path, cause: Cause) -> None:
    clock = [100.0]
    fault = Failure("rank 1 hangs", EXIT_FAULT, cause=cause)

    def decided(step: int) -> Restart | Failure:
        clock[0] += 1500  # so that the rate never ends it
        at(step, log, clock)
        return Restarts(log.parent, "3 per hour", lambda: clock[0]).decide(fault)

    assert [type(decided(step)) for step in (7, 7, 8, 8, 8)] == [Restart] * 5
    ended = decided(8)
    assert isinstance(ended, Failure) and ended.exit_code == EXIT_FAULT
    assert "3 restarts in a row got no further than step 8" in ended.message
    assert isinstance(decided(9), Restart)


def test_known_errors_and_exceptions_before_the_first_step_are_not_retried(log: Path) -> None:
    restarts = Restarts(log.parent, "9 per hour")
    for error in (
        Failure("data.train: row 3 is no JSON", 2),
        Failure("rank 0 failed\nValueError: x", 4, cause=Cause.ERROR),
    ):
        assert restarts.decide(error) is error


def test_restarts_are_counted_on_when_the_launcher_is_started_again(log: Path) -> None:
    clock = [100.0]
    killed = Failure("rank 1 was killed by an external SIGKILL", EXIT_FAULT, cause=Cause.PROCESS)
    error = Failure("rank 1 failed\nValueError: a bad row", EXIT_TRAINING, cause=Cause.ERROR)
    at(7, log, clock)
    first = Restarts(log.parent, "2 per hour", lambda: clock[0])
    assert isinstance(first.decide(error), Restart)
    again = Restarts(log.parent, "2 per hour", lambda: clock[0])
    at(7, log, clock)
    repeated = again.decide(error)
    assert isinstance(repeated, Failure) and "the same error happened twice" in repeated.message
    restart = again.decide(killed)
    assert isinstance(restart, Restart) and restart.number == 2
    assert isinstance(Restarts(log.parent, "2 per hour", lambda: clock[0]).decide(killed), Failure)


def test_two_commands_that_decide_about_one_run_count_together(log: Path) -> None:
    clock = [100.0]
    command, launcher = (Restarts(log.parent, "2 per hour", lambda: clock[0]) for _ in range(2))
    lost = Failure("node 0 (a) is gone", EXIT_FAULT, cause=Cause.NODE)
    error = Failure("rank 1 failed\nValueError: a bad row", EXIT_TRAINING, cause=Cause.ERROR)
    at(7, log, clock)
    assert isinstance(command.decide(lost), Restart)
    at(8, log, clock)
    restart = launcher.decide(error)
    assert isinstance(restart, Restart) and restart.number == 2
    at(8, log, clock)
    repeated = command.decide(error)
    assert isinstance(repeated, Failure) and "the same error happened twice after step 8" in repeated.message
    refused = command.decide(lost)
    assert isinstance(refused, Failure) and "allows 2 per hour" in refused.message


def test_restarts_are_counted_where_nothing_can_be_written(log: Path) -> None:
    restarts = Restarts(log.parent, "2 per hour")
    killed = Failure("rank 1 was killed by an external SIGKILL", EXIT_FAULT, cause=Cause.PROCESS)
    assert isinstance(restarts.decide(killed), Restart)
    (log.parent / "logs").rename(log.parent / "away")
    (log.parent / "logs").write_text("")
    assert isinstance(restarts.decide(killed), Restart)
    (log.parent / "logs").unlink()
    (log.parent / "away").rename(log.parent / "logs")
    assert isinstance(restarts.decide(killed), Failure), "the file knows of one restart only"


@pytest.mark.slow
def test_a_rank_that_is_stopped_until_the_timeout_is_not_said_to_have_been_killed(runs: Runs) -> None:
    started = runs.train(*SETTINGS, "train.max_steps=5000", "parallel.timeout=5 s", "faults.restarts=off")
    started.wait_for_step(5)
    kill(started, 1, signal.SIGSTOP)
    ended = started.wait()
    assert ended.code == 5
    assert "rank 0 lost its connection to another rank" in ended.stderr
    assert "SIGKILL" not in ended.stderr
