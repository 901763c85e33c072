"""Workers on this machine, alone or as one of several: started, watched, and ended when one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, EXIT_TRAINING, FaultError, convert_write_errors
from trainwright.machine.cgroups import count_memory_kills
from trainwright.recipe.registries import WATCHERS
from trainwright.run.group.rendezvous import host_store
from trainwright.run.nodes import Nodes, NodesLost
from trainwright.run.observers.hooks import after_workers
from trainwright.run.shutdown.failure import (
    Cause,
    Failure,
    build_error_record,
    find_first_failure,
    locate_error_file,
    raise_failure,
    read_error_records,
    read_slots,
)
from trainwright.run.shutdown.stop import Stopping, StopWatcher
from trainwright.run.worker_processes import WorkerRanks, Workers

if TYPE_CHECKING:
    from trainwright.parallel.world import RankInfo
    from trainwright.run.launches import Elastic

_LOOK_SECONDS = 0.05


def launch(entry: Callable[[], int], *, processes: int, logs: Path, stopping: Stopping) -> int:
    """Run ``entry`` in workers on this machine alone; return EXIT_FINISHED or EXIT_STOPPED. See ``run_workers``.

    Raises:
        TrainwrightError: the first failure, of the class of its exit code.
    """
    result = run_workers(entry, processes=processes, logs=logs, stopping=stopping)
    if isinstance(result, Failure):
        raise_failure(result)
    return result


def run_workers(
    entry: Callable[[], int],
    *,
    processes: int,
    logs: Path,
    stopping: Stopping,
    nodes: Nodes | None = None,
    watched: Path | None = None,
    elastic: Elastic | None = None,
) -> int | Failure:
    """Run ``entry`` in ``processes`` workers until all have ended; return EXIT_FINISHED, EXIT_STOPPED or the failure.

    Args:
        entry: of ``Workers``.
        stopping: entered by the caller.
        nodes: they have begun this launch, and each has as many workers.
        watched: the directory of the run that the workers train, for the registered watchers.
        elastic: looks whether the run is to go on with another number of processes.
    """
    if nodes is None:
        store = host_store()
        ranks = WorkerRanks(0, processes, processes, int(store.port))
    else:
        ranks, nodes.running = nodes.ranks(), True
    with convert_write_errors(logs):
        logs.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            locate_error_file(logs, rank).unlink(missing_ok=True)
    stopping.flags.fresh.value = stopping.flags.resize.value = 0
    killed_for_memory = count_memory_kills()
    verdict: dict[int, dict[str, Any]] = {}
    watchers = [] if watched is None else WATCHERS.present()  # imported before the workers are forked
    with stopping.let_workers_run():
        workers = Workers(entry, ranks, logs, stopping.flags)
        watches = [watcher.watch(watched, ranks, lambda: workers.alive) for watcher in watchers if watched is not None]
        checks = [StopWatcher(stopping, lambda: workers.alive).check, *(watch.check for watch in watches)]
        if elastic is not None:
            checks.append(elastic.check)
        try:
            while workers.alive and not (workers.have_failed or stopping.killed):
                workers.wait(_LOOK_SECONDS)
                if nodes is not None:
                    nodes.poll()
                for check in checks:
                    check()
            codes = workers.exit_codes
            if not (workers.have_failed or stopping.killed):
                if watched is not None:
                    after_workers(watched, ranks)
                exit_codes = [int(code or 0) for code in codes.values()]
                return _choose_joint_code(exit_codes + (nodes.finish(codes) if nodes else []))
        except WatcherVerdict as ended:
            verdict = {ended.rank: {**build_error_record(FaultError(str(ended))), "cause": ended.cause}}
        except NodesLost:
            pass
        finally:
            workers.kill()
            explanations = [line for watch in watches if (line := watch.close()) is not None]
    if stopping.killed:
        if nodes is not None:
            nodes.kill()
        return EXIT_STOPPED
    out_of_memory = count_memory_kills() > killed_for_memory
    early = {rank: build_error_record(error) for rank, error in workers.early_ends.items()}
    records = read_error_records(logs, ranks) | read_slots(workers.slots) | early | verdict
    if nodes is None:
        failure = find_first_failure(logs, processes, workers.exit_codes, out_of_memory, records=records)
    else:
        failure = nodes.fail(logs, workers.exit_codes, records, out_of_memory)
    return EXIT_STOPPED if stopping.killed else _add_explanations(failure, explanations)


def _add_explanations(failure: Failure, explanations: Sequence[str]) -> Failure:
    """Return the failure with what the run itself has done wrong, such as different collectives of ranks, which break
    their connections. It would happen again, whatever the machine.
    """
    if not explanations:
        return failure
    more = [line for line in explanations if line not in failure.message]
    cause = None if failure.cause is None else Cause.ERROR
    return replace(failure, message="\n".join([*more, failure.message]), exit_code=EXIT_TRAINING, cause=cause)


def _choose_joint_code(codes: list[int]) -> int:
    failures = [code for code in codes if code not in (EXIT_FINISHED, EXIT_STOPPED)]
    if failures:
        return failures[0]
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_FINISHED


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
