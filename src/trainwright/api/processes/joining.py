"""Runs whose processes another launcher has started: torchrun and the like run the script, and each process joins."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.api.processes.separate import answer, run_in_process
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, Interrupted, RequestError, Stopped, error_of
from trainwright.launch.group.environment import Variables, launcher_of
from trainwright.text import quoted

if TYPE_CHECKING:
    from trainwright.api.training import TrainingRequest
    from trainwright.launch.joined import JoinRequest

_OF_OUR_LAUNCHER = ("nodes", "node_rank", "rendezvous", "accelerate_config")
_started = itertools.count()


def launcher(nodes: int | None) -> str | None:
    """Return the launcher that started this process as one of several that train together, or None."""
    return launcher_of(Variables(os.environ), nodes or 1)


def join(request: TrainingRequest, name: str, progress: bool) -> Path:
    """Train as one of the processes that the launcher ``name`` has started; return the run directory. Raises like
    `train`.
    """
    from trainwright.launch.joined import JoinRequest

    if given := [key for key in _OF_OUR_LAUNCHER if getattr(request, key) is not None]:
        raise RequestError(f"{given[0]}: {name} started the processes and sets their rendezvous; remove it")
    overrides = tuple(request.with_number())
    seconds = request.rendezvous_timeout or JoinRequest.seconds
    joined = JoinRequest(
        request.recipe,
        overrides,
        request.resume,
        seconds,
        request.force,
        next(_started),
        os.getppid(),
        request.until,
        request.time_limit,
    )
    return run_in_process(_join, joined, progress=progress)


def _join(request: JoinRequest) -> Path:
    """Join in a separate process on every rank; it ends with the run, independently of the script's process."""
    from trainwright.launch.ending.left import left_in_words
    from trainwright.launch.ending.stop import interruptible
    from trainwright.launch.joined import run_joined

    failed: list[tuple[int, str]] = []

    def tell(code: int, message: str) -> None:
        failed.append((code, message))
        answer(None, error_of(code, message))  # at once: a failed rank does not return from training

    try:
        with interruptible():
            code, run = run_joined(request, tell)
    except Interrupted:
        raise Stopped("stopped before the first step; nothing was changed") from None
    if failed:
        raise error_of(*failed[0])
    assert run is not None, "a run that cannot start has failed"
    if code == EXIT_STOPPED:
        stopped = Stopped(f"{left_in_words(run)}; continue with --resume {quoted(run)}")
        stopped.run = run
        raise stopped
    if code != EXIT_FINISHED:
        raise error_of(code, f"the run ended with exit code {code}; its logs are in {run / 'logs'}")
    return run.absolute()
