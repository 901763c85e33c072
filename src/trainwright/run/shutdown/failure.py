"""Find which worker failed first, and why, from the files that failing workers leave behind and the kernel's counts."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from trainwright.engine.out_of_memory import OutOfMemory, is_out_of_memory
from trainwright.errors import EXIT_FAULT, EXIT_TRAINING, FaultError, TrainingError, TrainwrightError, build_error
from trainwright.run.shutdown.known_errors import format_advice, is_lost_connection, is_machine_fault
from trainwright.run.shutdown.stop import START_METHOD
from trainwright.utils.paths import write_file
from trainwright.utils.text import say

# Memory that a worker shares with its launcher for the record of its exception: the disk may be full, or the run
# directory deleted.
Slot = Any
_SLOT_BYTES = 2**16
_DONE = b"done "  # in the slot of a worker that has ended its part of the run, before its exit code
# A program, a user or the kernel sends them; the others follow from what the process does.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Cause(StrEnum):
    """What failed, if a restart may help."""

    PROCESS = "process"  # killed by a signal from outside
    CRASH = "crash"  # crashed in native code, exited without an error, or was killed because memory ran out
    CONNECTION = "connection"
    HANG = "hang"
    NODE = "node"  # a machine or its launcher is gone, or does not answer
    ERROR = "error"  # an exception that this program does not know


# Their message is the same however often they happen, but they say nothing about what the run computes.
FROM_OUTSIDE = (Cause.PROCESS, Cause.CONNECTION, Cause.HANG, Cause.NODE)


class EndedBySignal(FaultError):
    """A signal from outside, not from its launcher, ended a worker."""

    def __init__(self, rank: int, number: signal.Signals) -> None:
        source = "from a user, a scheduler or another program"
        super().__init__(f"rank {rank} was ended by an external {number.name}: {source}")


class EndedEarly(TrainingError):
    """A worker exited as if it were done, before the run had ended."""

    def __init__(self, rank: int, code: object, call: str = "os._exit, or a program that replaced it") -> None:
        super().__init__(f"rank {rank} ended itself with exit code {code} before the run had ended ({call})")
        self.rank = rank


def run_to_end(entry: Callable[[], int], rank: int) -> int:
    """Return what ``entry`` returns. Raises EndedEarly if a worker's code, such as a step policy, calls sys.exit."""
    try:
        return entry()
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"sys.exit at {frame.filename}:{frame.lineno}"
        raise EndedEarly(rank, 0 if error.code is None else error.code, location) from error


def record_exception(error: BaseException, slot: Slot | None = None) -> None:
    """Record the error that ends this worker where its launcher reads it: in its slot, and in torch's file of errors.

    https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    record = build_error_record(error)
    if slot is not None:
        slot.value = _shorten_record(record)
    with suppress(OSError):
        say(record["message"]["extraInfo"]["py_callstack"], file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # without space, nothing is written: torch parses it as JSON
            write_file(Path(path), json.dumps(record))


def create_slot() -> Slot:
    """Return an empty slot for one worker."""
    return multiprocessing.get_context(START_METHOD).RawArray(ctypes.c_char, _SLOT_BYTES)


def set_done(slot: Slot, code: int) -> None:
    """Note in a worker's slot that its part of the run has ended, with this exit code."""
    slot.value = _DONE + str(code).encode()


def read_slot_code(slot: Slot, code: int) -> int:
    """Return the exit code of a worker that has noted it in its slot; ``code``, its process's own, if it has not."""
    return int(slot.value.removeprefix(_DONE)) if slot.value.startswith(_DONE) else code


def read_slots(slots: dict[int, Slot]) -> dict[int, dict[str, Any]]:
    """Return the records in the workers' slots, by rank."""
    records = {}
    for rank, slot in slots.items():
        with suppress(ValueError):  # empty, done, or killed while it wrote
            records[rank] = json.loads(slot.value)
    return records


def _shorten_record(record: dict[str, Any]) -> bytes:
    """Return the record as JSON, with texts shortened to fit into a slot; tracebacks keep their end."""
    for limit in (_SLOT_BYTES, 10_000, 2_000):
        entry = record["message"]
        info = {**entry["extraInfo"], "py_callstack": entry["extraInfo"]["py_callstack"][-limit:]}
        message = {"message": entry["message"][:limit], "extraInfo": info}
        content = json.dumps({**record, "text": record["text"][:limit], "message": message}).encode()
        if len(content) < _SLOT_BYTES:
            return content
    return b""


def build_error_record(error: BaseException) -> dict[str, Any]:
    """Return the record of the exception that ends a worker; `message` is as torch's launchers read it."""
    now = time.time()
    # Without the frames of the worker's callers.
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    trace = "".join(traceback.format_exception(type(error), error, inner))
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))},
        },
        "time": now,
        "text": str(error),
        "known": isinstance(error, TrainwrightError),
        "exit_code": look_up_exit_code(error),
        "ran_out": _extract_memory_failure(error),
        "ended": isinstance(error, EndedBySignal),
        "cause": Cause.PROCESS if isinstance(error, EndedBySignal) else None,
    }


def look_up_exit_code(error: BaseException) -> int:
    """Return the exit code for an exception: that of its class, or of a fault of the machine if it reports one."""
    if isinstance(error, TrainwrightError):
        return error.exit_code
    return EXIT_FAULT if is_machine_fault(f"{type(error).__name__}: {error}") else EXIT_TRAINING


def _extract_memory_failure(error: BaseException) -> dict[str, Any] | None:
    """Return the fields of `MemoryFailure` for an out-of-memory exception, otherwise None."""
    if isinstance(error, OutOfMemory):
        return {"detail": error.detail, "in_training": True, "step": error.step, "rows": error.rows}
    return {"detail": str(error), "in_training": False} if is_out_of_memory(error) else None


@dataclass(frozen=True)
class MemoryFailure:
    """Memory ran out on a rank. `step` and the `rows` of its largest micro-batch are None if unknown.

    `in_training`: it may have happened in a step or an evaluation, so smaller micro-batches may help.
    """

    rank: int
    detail: str
    in_training: bool
    step: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class Failure:
    """The first failure of a launch: its message, its exit code, and whether memory ran out.

    `cause`: what failed, for the decision to restart; None for an error of the request, the data or the numbers.
    """

    message: str
    exit_code: int
    ran_out: MemoryFailure | None = None
    cause: Cause | None = None


def raise_failure(failure: Failure) -> NoReturn:
    """Raise a failure that ends the run."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r")  # a killed worker may have hidden the cursor for its progress bar
    raise build_error(failure.exit_code, failure.message)


def locate_error_file(logs: Path, rank: int) -> Path:
    """Return the file to which the worker of this rank writes the exception that ends it."""
    return logs / f"rank-{rank}.error.json"


def read_error_records(logs: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the error records of these ranks, for those that raised."""
    return {rank: record for rank in ranks if (record := _read(locate_error_file(logs, rank)))}


def find_first_failure(
    logs: Path,
    processes: int,
    exit_codes: dict[int, int | None],
    out_of_memory: bool,
    *,
    records: dict[int, dict[str, Any]] | None = None,
    gone: str | None = None,
) -> Failure:
    """Return the failure that caused the others.

    `records` are those of `read_error_records` for all ranks, if not all are in `logs`. `gone` says which machine was
    lost, and how. `exit_codes` maps ranks to exit codes, negative for signals; None: it has not ended, or the launcher
    killed it. `out_of_memory` says that the kernel killed a process for memory during the launch. An exception about a
    lost connection counts only if no rank raised another and none was killed.
    """
    records = read_error_records(logs, range(processes)) if records is None else records
    causes = {rank: r for rank, r in records.items() if not is_follow_up(r)}
    if not causes and gone is not None:
        return Failure(f"{gone}; the logs of its ranks are in {logs}", EXIT_FAULT, cause=Cause.NODE)
    silent = [rank for rank, code in sorted(exit_codes.items()) if rank not in records and code not in (None, 0)]
    if silent and all(record.get("ended") for record in causes.values()):
        rank = silent[0]
        code = exit_codes[rank]
        assert code is not None
        killed = code == -signal.SIGKILL and out_of_memory
        ran_out = MemoryFailure(rank, "the kernel killed the process", in_training=True) if killed else None
        message = f"rank {rank} {_describe_end(code, out_of_memory)}{_describe_log(logs, rank)}"
        outside = -code in _FROM_OUTSIDE and not killed
        # Another machine may not have the crash in native code; memory runs out there too.
        exit_code = EXIT_FAULT if code < 0 and not killed else EXIT_TRAINING
        return Failure(message, exit_code, ran_out, Cause.PROCESS if outside else Cause.CRASH)
    candidates = causes or records
    if candidates:
        rank = min(candidates, key=lambda r: float(candidates[r]["time"]))
        build_failure = describe_failure if causes else _build_connection_failure
        return build_failure(rank, candidates[rank], logs)
    ends = ", ".join(f"rank {rank}: exit code {code}" for rank, code in sorted(exit_codes.items()))
    return Failure(f"a worker failed without an error ({ends})\nlogs: {logs}", EXIT_TRAINING)


def describe_failure(rank: int, record: dict[str, Any], logs: Path) -> Failure:
    """Return the message and the exit code for one worker's record."""
    exit_code = int(record["exit_code"])
    ran_out = MemoryFailure(rank, **record["ran_out"]) if record.get("ran_out") else None
    if not record["known"]:
        trace = record["message"]["extraInfo"]["py_callstack"].rstrip()
        message = f"rank {rank} failed\n{trace}{format_advice(trace)}{_describe_log(logs, rank)}"
        return Failure(message, exit_code, ran_out, Cause.ERROR)
    cause = Cause(record["cause"]) if record.get("cause") else None
    if exit_code not in (EXIT_TRAINING, EXIT_FAULT):  # of the request: the rank that noticed it does not matter
        return Failure(record["text"], exit_code, cause=cause)
    text = f"{record['text']}{_describe_log(logs, rank, f'first seen on rank {rank}, ')}"
    return Failure(text, exit_code, ran_out, cause)


def _build_connection_failure(rank: int, record: dict[str, Any], logs: Path) -> Failure:
    """Return the failure of a rank that lost its connection though no other rank failed: it was cut."""
    error = record["message"]["message"].splitlines()[0]
    trace = record["message"]["extraInfo"]["py_callstack"]
    message = (
        f"rank {rank} lost its connection to another rank, and no rank reports another error: "
        f"{error}{format_advice(trace)}"
    )
    return Failure(message + _describe_log(logs, rank), int(record["exit_code"]), cause=Cause.CONNECTION)


def _describe_end(code: int, out_of_memory: bool) -> str:
    if code >= 0:
        return f"exited with code {code} and no error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL" and out_of_memory:
        return (
            "was killed by the kernel because the machine ran out of memory; lower train.micro_batch_size or "
            "data.max_length, or use fewer processes (parallel.num_processes)"
        )
    if name == "SIGKILL":
        return (
            "was killed by an external SIGKILL: from a user, a scheduler or a container's memory limit. If memory "
            "ran out, lower train.micro_batch_size"
        )
    if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        return f"crashed in native code ({name}); see the end of its log"
    return f"was ended by an external {name}"


def is_follow_up(record: dict[str, Any]) -> bool:
    """Return whether the exception is about a connection to a lost worker."""
    return not record["known"] and is_lost_connection(record["message"]["message"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "time" in record else None


def _describe_log(logs: Path, rank: int, before: str = "") -> str:
    """Return a line that names the log of a rank; empty if the run's directory has been deleted."""
    return f"\n{before}log: {logs / f'rank-{rank}.log'}" if logs.is_dir() else ""
