"""Report a rejection once per machine, although every process that a launcher started there meets it."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PREFIX = "trainwright-reported-"


_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


# How long to wait for rank 0 to report; and how long a report counts as one of this start.
_WAIT_SECONDS, _VALID_SECONDS = 3.0, 20.0


def should_report(rank: int, what: str) -> bool:
    """Return whether this process reports `what`: rank 0, or the first of the others if rank 0 does not.

    The processes that a launcher starts on one machine have the same parent.
    """
    directory = Path(tempfile.gettempdir())
    digest = hashlib.sha256(f"{os.getuid()} {os.getppid()} {what}".encode()).hexdigest()[:20]
    marker = directory / f"{_PREFIX}{digest}"
    if rank == 0:
        _remove_old(directory)
        with suppress(OSError):
            marker.touch()
        return True
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        if _is_fresh(marker):
            return False
        time.sleep(0.1)
    try:
        marker.unlink(missing_ok=True)
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def rank_from_variables(variables: Mapping[str, str]) -> int:
    """Return the rank that a launcher sets, even if its other variables are invalid; 0 if it sets none."""
    texts = (variables.get(name, "").strip() for name in _RANKS)
    return next((int(text) for text in texts if text.isascii() and text.isdigit()), 0)


def _is_fresh(marker: Path) -> bool:
    try:
        return time.time() - marker.stat().st_mtime < _VALID_SECONDS
    except OSError:
        return False


def _remove_old(directory: Path) -> None:
    for marker in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if marker.stat().st_uid == os.getuid() and not _is_fresh(marker):
                marker.unlink()
