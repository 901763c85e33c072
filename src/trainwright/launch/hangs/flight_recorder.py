"""NCCL's last collectives of every rank, which torch's flight recorder keeps and writes when a run hangs.

https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html; `torchfrtrace` of torch compares the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_KEPT = 2000  # collectives
_LONGEST_WAIT, _POLL_SECONDS = 4.0, 0.1
_PREFIX = "nccl-rank-"  # torch appends the rank, and ".pipe" to the name of the pipe


def keep_collectives(logs: Path, pipes: Path | None) -> None:
    """Have torch keep the collectives of process groups that begin later in this process; the user's values stay.

    Args:
        pipes: directory of the pipes through which ``write_collectives`` asks for them.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(_KEPT),
        "TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / _PREFIX),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    if pipes is not None:
        wanted["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = str(pipes / _PREFIX)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def write_collectives(pipes: Path, ranks: Iterable[int], logs: Path) -> dict[int, int]:
    """Ask these ranks to write their collectives to the run's logs.

    Returns:
        When each one that was asked has written them before, as its file has it; ranks without NCCL have no pipe.
    """
    asked = {}
    for rank in ranks:
        with suppress(OSError):
            pipe = os.open(_pipe(pipes, rank), os.O_WRONLY | os.O_NONBLOCK)
            try:
                asked[rank] = _state(logs, rank)[0]
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)
    return asked


def wait_for_collectives(logs: Path, asked: Mapping[int, int]) -> None:
    """Wait until the ranks have written what `write_collectives` has asked for, which may take torch a second.

    A rank may be suspended, so this does not wait for long.
    """
    end, before = time.monotonic() + _LONGEST_WAIT, dict[int, tuple[int, int]]()
    while asked and time.monotonic() < end:
        now = {rank: _state(logs, rank) for rank in asked}
        if now == before and all(now[rank][0] != asked[rank] for rank in asked):
            return
        before = now
        time.sleep(_POLL_SECONDS)


def _state(logs: Path, rank: int) -> tuple[int, int]:
    """Return when a rank's file was written, in nanoseconds, and its size."""
    try:
        found = (logs / f"{_PREFIX}{rank}").stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def remove_pipes(pipes: Path, ranks: Iterable[int]) -> None:
    """Remove the pipes of ranks."""
    for rank in ranks:
        with suppress(OSError):
            _pipe(pipes, rank).unlink()


def _pipe(pipes: Path, rank: int) -> Path:
    return pipes / f"{_PREFIX}{rank}.pipe"
