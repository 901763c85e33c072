"""Directories that one process at a time works in."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainwright.errors import RequestError

_LOOKS = 0.05  # seconds


@contextmanager
def hold(directory: Path, refusal: str, patience: float = 0.0) -> Iterator[None]:
    """Keep others who ask from ``directory``, which is there; nothing is written, and a killed process holds nothing.

    Processes that are forked meanwhile hold it too until they end.

    Args:
        refusal: what is said where another process holds it.
        patience: seconds to wait for that one.

    Raises:
        RequestError: ``refusal``.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if not _locked(descriptor, time.monotonic() + patience):
            raise RequestError(refusal)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOKS)
