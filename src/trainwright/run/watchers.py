"""What watches the workers of a run for what their exits do not show, such as a hang; ``WATCHERS`` registers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from trainwright.run.shutdown.failure import Cause

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo
    from trainwright.run.worker_processes import WorkerRanks


class WatcherVerdict(Exception):
    """What a watcher sees ends this launch.

    Args:
        rank: the first that is to blame.
        cause: of the failure, if a restart may help.
    """

    def __init__(self, message: str, rank: int, cause: Cause | None) -> None:
        super().__init__(message)
        self.rank, self.cause = rank, cause


class LaunchWatch(Protocol):
    """Watches the workers of one launch on this machine."""

    def check(self) -> None:
        """Inspect the workers; called in every turn of the supervisor's loop. Raises WatcherVerdict."""

    def close(self) -> str | None:
        """End after the workers; return what the run itself has done wrong, if that explains its failure."""


class Watcher(Protocol):
    """Watches the workers of any run."""

    def install(self, run: Path, rank: int) -> None:
        """Set in a worker, before it begins, what a watch needs there."""

    def watch(self, run: Path, ranks: WorkerRanks, processes: Callable[[], Mapping[int, int]]) -> LaunchWatch:
        """Return the watch of these ranks; ``processes`` returns the pid of every rank here that has not ended."""

    def watch_beside(
        self, run: Path, rank_info: RankInfo, terminal: TextIO, received: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """Watch the workers of this machine while one that another launcher has started trains in the context.

        Args:
            terminal: where the process of rank 0's machine reports.
            received: returns the message of another rank's failure, or "".
        """
