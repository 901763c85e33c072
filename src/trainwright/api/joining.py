"""Runs whose processes another launcher has started: torchrun and the like run the script, and each process joins."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.api.apart import answer, apart
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, Interrupted, RequestError, Stopped, error_of
from trainwright.launch.group.environment import Variables, launcher_of

if TYPE_CHECKING:
    from trainwright.api.training import TrainingAsked
    from trainwright.launch.group.joined import JoinAsked
    from trainwright.parallel.world import RankInfo

_OF_OUR_LAUNCHER = ("nodes", "node_rank", "rendezvous", "accelerate_config")
_started = itertools.count()


def launcher(nodes: int | None) -> str | None:
    """Return the launcher that started this process as one of several that train together, or None."""
    return launcher_of(Variables(os.environ), nodes or 1)


def join(asked: TrainingAsked, name: str, progress: bool) -> Path:
    """Train as one of the processes that the launcher ``name`` has started; return the run directory. Raises like
    `train`.
    """
    from trainwright.launch.group.joined import JoinAsked

    if given := [key for key in _OF_OUR_LAUNCHER if getattr(asked, key) is not None]:
        raise RequestError(f"{given[0]}: {name} started the processes and sets their rendezvous; remove it")
    overrides = tuple(asked.with_number())
    seconds = asked.rendezvous_timeout or JoinAsked.seconds
    joined = JoinAsked(asked.recipe, overrides, asked.resume, seconds, asked.force, next(_started), os.getppid())
    return apart(_join, joined, progress=progress)


def _join(asked: JoinAsked) -> Path:
    """Join in a separate process on every rank; it ends with the run, independently of the script's process."""
    from trainwright.launch.ending.stop import interruptible
    from trainwright.launch.group.joined import run_joined
    from trainwright.worker import prepare, work

    found: list[Path] = []

    def train(run: Path, resume: bool, rank_info: RankInfo) -> int:
        found.append(run)
        return work(run, resume, rank_info)

    failed: list[tuple[int, str]] = []

    def tell(code: int, message: str) -> None:
        failed.append((code, message))
        answer(None, error_of(code, message))  # at once: a failed rank does not return from training

    try:
        with interruptible():
            code = run_joined(asked, prepare, train, tell)
    except Interrupted:
        raise Stopped("stopped before the first step; nothing was changed") from None
    if failed:
        raise error_of(*failed[0])
    if code == EXIT_STOPPED:
        stopped = Stopped(f"stopped after a checkpoint; continue with --resume {found[0]}")
        stopped.run = found[0]
        raise stopped
    if code != EXIT_FINISHED:
        raise error_of(code, f"the run ended with exit code {code}; its logs are in {found[0] / 'logs'}")
    return found[0].absolute()
