"""Stop a run that another process trains."""

from __future__ import annotations

import time
from os import PathLike

from trainwright.api.run import Run
from trainwright.errors import RequestError
from trainwright.launch.ending.requests import STOP_FILE
from trainwright.machine.file_lock import is_locked

_LOOK_SECONDS = 0.2


def stop(run: Run | str | PathLike[str], timeout: float = 600.0) -> str:
    """Ask a run to stop after its current step, with a checkpoint; what ``trainwright stop`` does.

    Args:
        run: a run that is training, or its directory.
        timeout: how many seconds to wait until it has ended.

    Returns:
        ``stopped``, ``finished`` (it ended first), ``unfinished`` (it failed), or ``stopping`` after the timeout.

    Raises:
        RequestError: no process trains the run, or the request cannot be written.

    Examples:
        >>> import trainwright as tw
        >>> tw.stop("runs/tiny")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: runs/tiny is not being trained here; for another machine, create runs/tiny/stop
    """
    found = Run(run)
    if not is_locked(found.directory):
        raise RequestError(
            f"{found.directory} is not being trained here; for another machine, create {found.directory / STOP_FILE}"
        )
    try:
        (found.directory / STOP_FILE).touch()
    except OSError as error:
        raise RequestError(f"{found.directory / STOP_FILE} cannot be written: {error.strerror}") from None
    end = time.monotonic() + timeout
    while is_locked(found.directory):
        if time.monotonic() >= end:
            return "stopping"
        time.sleep(_LOOK_SECONDS)
    return found.status
