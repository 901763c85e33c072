"""NCCL's last collectives of every rank, which torch's flight recorder keeps and writes when a run hangs.

https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html; `torchfrtrace` of torch compares the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_KEPT = 2000  # collectives
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


def write_collectives(pipes: Path, ranks: Iterable[int]) -> None:
    """Ask these ranks to write their collectives to the run's logs; ranks without NCCL have no pipe."""
    for rank in ranks:
        with suppress(OSError):
            pipe = os.open(_pipe(pipes, rank), os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)


def remove_pipes(pipes: Path, ranks: Iterable[int]) -> None:
    """Remove the pipes of ranks."""
    for rank in ranks:
        with suppress(OSError):
            _pipe(pipes, rank).unlink()


def _pipe(pipes: Path, rank: int) -> Path:
    return pipes / f"{_PREFIX}{rank}.pipe"
