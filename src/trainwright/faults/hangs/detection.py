"""The detection of hangs, as the registry of watchers has it, in workers and beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trainwright.faults.hangs.evidence import keep_collectives, write_stacks_on_signal
from trainwright.faults.hangs.machines import Machines
from trainwright.faults.hangs.sidecar_watcher import watching
from trainwright.faults.hangs.watcher import HangWatcher, WatchedRun
from trainwright.utils.heartbeat_file import heartbeat_directory

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo
    from trainwright.run.worker_processes import WorkerRanks


class HangDetection:
    """A ``run.supervisor.Watcher``."""

    def install(self, run: Path, rank: int) -> None:
        """Have torch keep this worker's collectives, and write its stacks on a signal."""
        keep_collectives(run / "logs", heartbeat_directory(run))
        write_stacks_on_signal(run / "logs", rank)

    def watch(self, run: Path, ranks: WorkerRanks, processes: Callable[[], Mapping[int, int]]) -> HangWatcher:
        """Return the watcher of the supervisor's workers."""
        machines = None if ranks.is_alone else Machines(run, ranks.size, not ranks.first)
        return HangWatcher(WatchedRun.of(run), processes, machines)

    def watch_beside(
        self, run: Path, rank_info: RankInfo, terminal: TextIO, received: Callable[[], str]
    ) -> AbstractContextManager[None]:
        """Watch in a process beside the workers of this machine."""
        return watching(run, rank_info, terminal, received)


HANGS = HangDetection()
