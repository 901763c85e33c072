"""Which of several failures is the first one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from trainwright.engine.out_of_memory import OutOfMemory
from trainwright.errors import EXIT_FAULT, EXIT_TRAINING, RequestError
from trainwright.run.shutdown.failure import (
    Cause,
    EndedBySignal,
    MemoryFailure,
    build_error_record,
    create_slot,
    find_first_failure,
    locate_error_file,
    look_up_exit_code,
    read_slots,
    record_exception,
)
from trainwright.run.shutdown.stop import Stopping
from trainwright.run.supervisor import run_workers


def fail(logs: Path, rank: int, time: float, text: str, known: bool = False, exit_code: int = 4) -> None:
    message = {
        "message": text,
        "extraInfo": {"py_callstack": f"Traceback: {text}", "timestamp": str(int(time))},
    }
    record = {"message": message, "time": time, "text": text, "known": known, "exit_code": exit_code}
    locate_error_file(logs, rank).write_text(json.dumps(record))


def test_earliest_wins(tmp_path: Path) -> None:
    fail(tmp_path, 0, 100.7, "ValueError: second")
    fail(tmp_path, 1, 100.2, "ValueError: first")
    failure = find_first_failure(tmp_path, 2, {0: 4, 1: 4}, False)
    assert "rank 1 failed\nTraceback: ValueError: first" in failure.message


def test_lost_connection_is_never_the_cause_where_there_is_another(tmp_path: Path) -> None:
    fail(tmp_path, 0, 100.1, "RuntimeError: Connection closed by peer [127.0.0.1]:4242")
    fail(tmp_path, 1, 100.2, "ValueError: cause")
    assert "cause" in find_first_failure(tmp_path, 2, {0: 4, 1: 4}, False).message


def test_killed_rank_is_the_cause_of_lost_connections(tmp_path: Path) -> None:
    fail(tmp_path, 0, 100.1, "RuntimeError: Connection reset by peer")
    message = find_first_failure(tmp_path, 2, {0: 4, 1: -signal.SIGKILL}, out_of_memory=True).message
    assert message.startswith("rank 1 was killed by the kernel because the machine ran out of memory")
    assert "train.micro_batch_size" in message


def test_rank_that_the_agent_took_down_is_not_the_cause(tmp_path: Path) -> None:
    fail(tmp_path, 1, 100.1, "ValueError: cause")
    assert "cause" in find_first_failure(tmp_path, 2, {0: -signal.SIGTERM, 1: 4}, False).message


def test_only_lost_connections_are_told_as_they_are(tmp_path: Path) -> None:
    fail(tmp_path, 0, 100.1, "RuntimeError: Connection reset by peer")
    failure = find_first_failure(tmp_path, 2, {0: 4, 1: None}, False)
    assert "rank 0 lost its connection to another rank, and no rank reports another error" in failure.message
    assert "Connection reset" in failure.message and "Traceback" not in failure.message
    assert failure.cause is Cause.CONNECTION


def test_a_known_error_is_explained_below_its_traceback(tmp_path: Path) -> None:
    fail(tmp_path, 0, 100.1, "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn")
    message = find_first_failure(tmp_path, 1, {0: 4}, False).message
    assert "\nnothing in the loss requires a gradient: " in message and "\n- before training: " in message
    fail(tmp_path, 0, 100.1, "ValueError: boom")
    assert find_first_failure(tmp_path, 1, {0: 4}, False).message.count("\n") == 2


@pytest.mark.parametrize(
    "waited",
    [
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4",
        "RuntimeError: NCCL error: remote process exited or there was a network error",
        "DistNetworkError: failed to recv, got 0 bytes",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_a_rank_that_waited_is_not_the_cause(tmp_path: Path, waited: str) -> None:
    fail(tmp_path, 0, 100.1, waited)
    fail(tmp_path, 1, 100.2, "ValueError: cause")
    assert find_first_failure(tmp_path, 2, {0: 4, 1: 4}, False).message.startswith("rank 1 failed")


def test_native_crash_points_to_the_log(tmp_path: Path) -> None:
    message = find_first_failure(tmp_path, 1, {0: -signal.SIGSEGV}, False).message
    assert "SIGSEGV" in message and "rank-0.log" in message


def test_memory_that_ran_out_is_told_apart(tmp_path: Path) -> None:
    training = OutOfMemory("no room", detail="1 GiB asked for", step=3, rows=4)
    errors: list[Exception] = [training, MemoryError(), RuntimeError("CUDA out of memory."), ValueError("another")]
    found = []
    for error in errors:
        locate_error_file(tmp_path, 0).write_text(json.dumps(build_error_record(error)))
        found.append(find_first_failure(tmp_path, 1, {0: 4}, False).ran_out)
    assert found[0] == MemoryFailure(0, "1 GiB asked for", in_training=True, step=3, rows=4)
    assert [each and each.in_training for each in found] == [True, False, False, None]


def test_a_kill_is_for_memory_where_the_kernel_counted_one(tmp_path: Path) -> None:
    killed: dict[int, int | None] = {0: None, 1: -signal.SIGKILL}
    counted = find_first_failure(tmp_path, 2, killed, out_of_memory=True).ran_out
    assert counted == MemoryFailure(1, "the kernel killed the process", in_training=True)
    assert find_first_failure(tmp_path, 2, killed, out_of_memory=False).ran_out is None


def test_machine_error_keeps_its_exit_code(tmp_path: Path) -> None:
    fail(tmp_path, 0, 100.1, "no such GPU", known=True, exit_code=3)
    failure = find_first_failure(tmp_path, 1, {0: 3}, False)
    assert (failure.message, failure.exit_code) == ("no such GPU", 3)


@pytest.mark.slow
def test_a_rank_that_a_signal_has_ended_is_the_cause_of_what_others_say_of_connections(tmp_path: Path) -> None:
    slots = {rank: create_slot() for rank in range(3)}
    record_exception(RuntimeError(f"[gloo/transport/tcp/pair.cc:534] {'x' * 200_000}"), slots[0])
    record_exception(EndedBySignal(2, signal.SIGTERM), slots[2])
    slots[1].value = b'{"time": 1'  # killed while it wrote
    records = read_slots(slots)
    assert records.keys() == {0, 2}
    failure = find_first_failure(tmp_path, 3, {0: 4, 1: None, 2: 143}, False, records=records)
    assert failure.message.startswith("rank 2 was ended by an external SIGTERM") and failure.exit_code == 5
    # One that crashed is told of before one that may have been ended because of that.
    crashed = find_first_failure(tmp_path, 3, {0: 4, 1: -signal.SIGSEGV, 2: 143}, False, records=records)
    assert crashed.message.startswith("rank 1 crashed")


def test_what_a_worker_ends_with_is_known_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = create_slot()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "rank-0.error.json"))
    record_exception(ValueError("boom"), slot)
    assert "ValueError: boom" in find_first_failure(tmp_path, 1, {0: 4}, False, records=read_slots({0: slot})).message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ValueError: a bad row", EXIT_TRAINING),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", EXIT_FAULT),
        ("RuntimeError: NCCL error: remote process exited or there was a network error", EXIT_FAULT),
    ],
)
def test_an_exception_about_hardware_or_a_connection_has_the_code_of_a_fault(text: str, code: int) -> None:
    assert look_up_exit_code(RuntimeError(text)) == code


@pytest.mark.parametrize(
    ("ended", "out_of_memory", "code"),
    [
        (-signal.SIGKILL, False, EXIT_FAULT),
        (-signal.SIGKILL, True, EXIT_TRAINING),
        (-signal.SIGSEGV, False, EXIT_FAULT),
        (7, False, EXIT_TRAINING),
    ],
)
def test_a_rank_without_an_exception_has_the_code_of_what_ended_it(
    tmp_path: Path, ended: int, out_of_memory: bool, code: int
) -> None:
    assert find_first_failure(tmp_path, 2, {0: None, 1: ended}, out_of_memory).exit_code == code


def test_a_lost_node_is_a_fault(tmp_path: Path) -> None:
    failure = find_first_failure(tmp_path, 2, {0: None}, False, gone="node 1 (b) is gone")
    assert (failure.exit_code, failure.cause) == (EXIT_FAULT, Cause.NODE)
    assert failure.message.startswith("node 1 (b) is gone; ")


def test_logs_that_cannot_be_written_when_workers_start_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank-1.error.json").mkdir()
    with pytest.raises(RequestError, match=f"{tmp_path}: a run cannot be written there: Is a directory"):
        run_workers(lambda: 0, processes=2, logs=tmp_path, stopping=Stopping())
