"""Which worker failed first, and why: read from the files that failing workers leave behind."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from trainwright.errors import EXIT_TRAINING, TrainwrightError
from trainwright.launch.stop import CLOSED_BY_LAUNCHER

# What gloo, NCCL and the store say on the ranks that were waiting for one that is gone.
_FOLLOW_UP = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|broken pipe|socket (is )?closed|"
    r"recvvalue failed|sendbytes failed|remote process exited|ncclremoteerror|distnetworkerror|"
    r"connectFullMesh failed|application timeout caused pair closure",
    re.IGNORECASE,
)


class RankErrorHandler(ErrorHandler):
    """Torch's error file with what choosing the first failure needs: the exact time and the exit code."""

    def record_exception(self, e: BaseException) -> None:
        now = time.time()
        # Without the frame of torch's wrapper around the worker.
        inner = e.__traceback__.tb_next if e.__traceback__ else None
        trace = "".join(traceback.format_exception(type(e), e, inner))
        print(trace, file=sys.stderr, flush=True)
        path = self._get_error_file_path()
        if not path:
            return
        known = isinstance(e, TrainwrightError)
        record = {
            "message": {
                "message": f"{type(e).__name__}: {e}",
                "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))},
            },
            "time": now,
            "text": str(e),
            "known": known,
            "exit_code": e.exit_code if isinstance(e, TrainwrightError) else EXIT_TRAINING,
        }
        Path(path).write_text(json.dumps(record), encoding="utf-8")


@dataclass(frozen=True)
class Failure:
    """The first failure of a launch: what to print, and what to exit with."""

    message: str
    exit_code: int


def error_file(logs: Path, rank: int) -> Path:
    """Where the worker of this rank writes the exception it ends with."""
    return logs / f"rank-{rank}.error.json"


def first_failure(
    logs: Path, processes: int, exit_codes: dict[int, int | None], out_of_memory: bool
) -> Failure:
    """The failure that the others follow from.

    `exit_codes` maps ranks to exit codes as far as they are known, negative for signals. `out_of_memory` says
    that the kernel killed some process for memory during the launch. An exception that speaks of a lost
    connection counts only where no rank raised another and none was killed.
    """
    records = {rank: record for rank in range(processes) if (record := _read(error_file(logs, rank)))}
    causes = {rank: r for rank, r in records.items() if not _is_follow_up(r)}
    silent = [
        rank
        for rank, code in sorted(exit_codes.items())
        if rank not in records and code not in (None, 0, CLOSED_BY_LAUNCHER, -signal.SIGTERM)
    ]
    if not causes and silent:
        rank = silent[0]
        code = exit_codes[rank]
        assert code is not None
        return Failure(f"rank {rank} {_ended(code, out_of_memory)}\nlog: {_log(logs, rank)}", EXIT_TRAINING)
    candidates = causes or records
    if candidates:
        rank = min(candidates, key=lambda r: float(candidates[r]["time"]))
        return _describe(rank, candidates[rank], logs)
    ends = ", ".join(f"rank {rank}: exit code {code}" for rank, code in sorted(exit_codes.items()))
    return Failure(f"a worker failed without an error ({ends})\nlogs: {logs}", EXIT_TRAINING)


def _describe(rank: int, record: dict[str, Any], logs: Path) -> Failure:
    exit_code = int(record["exit_code"])
    if not record["known"]:
        trace = record["message"]["extraInfo"]["py_callstack"].rstrip()
        return Failure(f"rank {rank} failed\n{trace}\nlog: {_log(logs, rank)}", exit_code)
    if exit_code != EXIT_TRAINING:  # the request or the machine: the rank that noticed does not matter
        return Failure(record["text"], exit_code)
    return Failure(f"{record['text']}\nfirst seen on rank {rank}, log: {_log(logs, rank)}", exit_code)


def _ended(code: int, out_of_memory: bool) -> str:
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
            "was killed (SIGKILL) from outside: by a user, a scheduler or a container's memory limit. "
            "If memory was short, lower train.micro_batch_size"
        )
    if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        return f"crashed inside native code ({name}); its log ends with where"
    return f"was ended by {name} from outside"


def _is_follow_up(record: dict[str, Any]) -> bool:
    return not record["known"] and bool(_FOLLOW_UP.search(record["message"]["message"]))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "time" in record else None


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"
