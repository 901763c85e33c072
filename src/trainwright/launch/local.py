"""Worker processes on this machine, through torch's elastic agent; on one node or as one of several.

On one node, workers meet on a free port of the loopback interface; several nodes have already met at node 0's store.

The agent provides the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, …), watches the workers and ends the
others when one fails. This module adds: workers forked from a parent that has already imported the libraries, one log
per rank, a graceful stop, and a single report of the first failure.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainwright.engine.events import Event, Fault, Restart
from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, EXIT_TRAINING, FaultError, TrainwrightError, error_of
from trainwright.launch.ending import oom_killer, stop
from trainwright.launch.ending.agent_log import quiet_agent
from trainwright.launch.ending.failure import (
    Cause,
    Ended,
    Failure,
    RankErrorHandler,
    Slot,
    ended_from_outside,
    error_file,
    error_record,
    error_records,
    first_failure,
    new_slot,
    slot_records,
)
from trainwright.launch.ending.stop import START_METHOD, Stopping
from trainwright.launch.ending.stop_watcher import StopWatcher
from trainwright.launch.group.elastic import Elastic
from trainwright.launch.group.nodes import Nodes, NodesLost
from trainwright.launch.group.rendezvous import LOOPBACK, host_store
from trainwright.launch.hangs.judge import Conflict
from trainwright.launch.hangs.watcher import HangWatcher, RunHangs, Watched
from trainwright.launch.process import enter_process, forking, threads_allowed
from trainwright.launch.relaunch import Relaunch
from trainwright.text import say

_MONITOR_SECONDS = 0.05
_SHUTDOWN_SECONDS = 10
# The nodes wait for each other afterwards and notice when one is gone; the agent would not.
_BARRIER_SECONDS = 0.1


def launch(
    entry: Callable[[], int],
    *,
    processes: int,
    logs: Path,
    stopping: Stopping,
    nodes: Nodes | None = None,
    relaunch: Relaunch | None = None,
    watched: Watched | None = None,
) -> int:
    """Run `entry` in `processes` workers; return EXIT_FINISHED or EXIT_STOPPED.

    `entry` returns EXIT_FINISHED or EXIT_STOPPED, or raises; where processes are spawned instead of forked (not Linux)
    it must be picklable. `logs` receives rank-<r>.log, launcher.log, and rank-<r>.error.json for a worker that raised.
    The caller enters `stopping`. With `nodes`, each node runs the same number of workers. `relaunch` decides what to do
    after a failure; without it the launch ends. Several nodes relaunch only when memory ran out.
    `watched` is the run that the workers train, to notice a hang.

    Raises:
        TrainwrightError: the first failure, of the class of its exit code.
    """
    elastic = None if relaunch is None else relaunch.elastic
    once = functools.partial(launch_once, logs=logs, stopping=stopping, nodes=nodes, watched=watched, elastic=elastic)
    for number in itertools.count():
        ended = once(entry, processes=processes, number=number)
        if isinstance(ended, int):
            return ended
        fault = _decide(ended, stopping, nodes, relaunch)
        restart: Event | Failure = ended if fault is None else Fault(**fault)
        if fault is None and relaunch is not None and nodes is None and not stopping.flag.value:
            restart = relaunch.restarts.decide(ended)
        if isinstance(restart, Failure):
            _show_cursor()
            raise error_of(restart.exit_code, restart.message)
        if isinstance(restart, Restart):
            say(restart.line(), file=sys.stderr)
        assert relaunch is not None, "it has decided"
        entry = relaunch.resumed(restart)
        if elastic is not None and not (processes := elastic.next()):
            return EXIT_STOPPED
    raise AssertionError("launches are counted without end")


def launch_once(
    entry: Callable[[], int],
    *,
    processes: int,
    logs: Path,
    stopping: Stopping,
    nodes: Nodes | None = None,
    number: int = 0,
    watched: Watched | None = None,
    elastic: Elastic | None = None,
) -> int | Failure:
    """Launch once, like `launch`, but return any failure. `number` counts the launches of a run."""
    logs.mkdir(parents=True, exist_ok=True)
    first = processes * nodes.index if nodes else 0
    ranks = range(first, first + processes)
    for rank in ranks:
        error_file(logs, rank).unlink(missing_ok=True)
    rendezvous = _OneNode(processes) if nodes is None else _SeveralNodes(processes, nodes, number)
    alive = functools.partial(rendezvous.alive, first)
    everywhere = processes * (nodes.count if nodes else 1)
    hangs = None if watched is None else HangWatcher.of(watched, alive, processes, everywhere, not first)
    rendezvous.checks = [each.check for each in (StopWatcher(stopping, alive), hangs, elastic) if each is not None]
    stopping.flags.fresh.value = stopping.flags.closing.value = stopping.flags.resize.value = 0
    slots = {rank: new_slot() for rank in ranks}
    killed_for_memory = oom_killer.kills()
    codes: dict[int, int | None] = {}
    hang: dict[int, dict[str, Any]] = {}
    try:
        with quiet_agent(logs / _agent_log(nodes)), _agent_environment(loopback=nodes is None):
            stopping.kill = functools.partial(_kill_workers, nodes)
            arguments = (entry, logs, os.getpid(), stopping.flags, slots)
            with forking():
                result = _agent(rendezvous, processes, logs, arguments, stopping.flags).run()
        codes = rendezvous.exit_codes(first) | {rank: f.exitcode for rank, f in result.failures.items()}
        if not result.is_failed():
            codes = {rank: int(code or 0) for rank, code in result.return_values.items()}
            others = nodes.finish(codes) if nodes else []
            return _joint_code([int(code or 0) for code in codes.values()] + others)
    except RunHangs as hanging:
        codes = rendezvous.exit_codes(first)
        cause = Cause.HANG if watched is not None and watched.on_hang == "restart" else None
        hang = {hanging.verdict.ranks[0]: {**error_record(FaultError(str(hanging))), "cause": cause}}
    except NodesLost:
        codes = codes or rendezvous.exit_codes(first)
    except SignalException as ending:
        return EXIT_STOPPED if stopping.killed else Failure(str(ending), EXIT_TRAINING)
    finally:
        conflict = None if hangs is None else hangs.close()
    out_of_memory = oom_killer.kills() > killed_for_memory
    records = error_records(logs, ranks) | slot_records(slots) | hang
    if nodes is None:
        return _explained(first_failure(logs, processes, codes, out_of_memory, records=records), conflict)
    failure = nodes.fail(logs, codes, records, out_of_memory)
    return EXIT_STOPPED if stopping.killed else _explained(failure, conflict)


def _explained(failure: Failure, conflict: Conflict | None) -> Failure:
    """Return the failure with the different collectives that ranks have entered, which break their connections."""
    if conflict is None or conflict.detail in failure.message:
        return failure
    return replace(failure, message=f"{conflict.detail}\n{failure.message}")


def _decide(
    failure: Failure, stopping: Stopping, nodes: Nodes | None, relaunch: Relaunch | None
) -> dict[str, Any] | None:
    """Return the fault that the next launch reports, or None for no further launch. The same on all nodes."""

    def decide() -> dict[str, Any] | None:
        if relaunch is None or failure.ran_out is None or stopping.flag.value:
            return None
        return relaunch.decide(failure.ran_out)

    return decide() if nodes is None else nodes.agree_on_relaunch(decide)


def _joint_code(codes: list[int]) -> int:
    others = [code for code in codes if code not in (EXIT_FINISHED, EXIT_STOPPED)]
    if others:
        return others[0]
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_FINISHED


def _worker(entry: Callable[[], int], logs: Path, parent: int, flags: stop.Flags, slots: dict[int, Slot]) -> int:
    rank = int(os.environ["RANK"])
    enter_process(logs / f"rank-{rank}.log", parent=parent, keep_console=rank == 0)
    errors = RankErrorHandler(slots[rank])
    stop.follow_launcher(flags, functools.partial(_ended_from_outside, rank, errors))
    torch.set_num_threads(threads_allowed())
    try:
        return record(entry, errors)() or EXIT_FINISHED
    except Exception as error:
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit immediately: the other ranks wait for this one, and its threads may not be joinable any more.
        os._exit(error.exit_code if isinstance(error, TrainwrightError) else EXIT_TRAINING)


def _ended_from_outside(rank: int, errors: RankErrorHandler, number: signal.Signals) -> None:
    """Record the reason like an exception: errors of other ranks about broken connections follow from it."""
    errors.record_exception(Ended(ended_from_outside(rank, number)))


class _OneNode(RendezvousHandler):
    """A single agent: its store listens on a loopback port that the kernel picks, so ports cannot collide.

    Torch's own static rendezvous needs a port chosen beforehand and listens on every interface; its c10d one runs a
    thread, which a parent that forks should not have.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._run_id = uuid.uuid4().hex
        self._store: Store | None = None
        self.checks: list[Callable[[], None]] = []
        self._workers: list[multiprocessing.process.BaseProcess] = []

    def get_backend(self) -> str:
        return "trainwright"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = store = host_store(LOOPBACK, 0, "")
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def num_nodes_waiting(self) -> int:
        # The agent calls this repeatedly while its workers run: poll them here.
        for check in self.checks:
            check()
        return 0

    def get_run_id(self) -> str:
        # The agent's report names only one failed worker. It reads this name right after starting the workers, so keep
        # references to all of them here, for the exit code of each.
        if len(self._workers) < self._processes:
            self._workers = sorted(multiprocessing.active_children(), key=_started_as)
        return self._run_id

    def alive(self, first: int) -> dict[int, int]:
        """Return the pids by rank of the workers that have not ended; `first` is the lowest rank here."""
        return {rank: int(worker.pid or 0) for rank, worker in enumerate(self._workers, first) if worker.is_alive()}

    def exit_codes(self, first: int) -> dict[int, int | None]:
        """Return the exit codes by rank, negative for signals; `first` is the lowest rank here."""
        return {rank: worker.exitcode for rank, worker in enumerate(self._workers, first)}

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class _SeveralNodes(_OneNode):
    """One of several agents, at the store where the nodes have met. Ranks follow the node numbers."""

    def __init__(self, processes: int, nodes: Nodes, number: int) -> None:
        super().__init__(processes)
        self._nodes = nodes
        self._number = number

    def next_rendezvous(self) -> RendezvousInfo:
        nodes = self._nodes
        nodes.running = True
        info = RendezvousStoreInfo(nodes.rendezvous.address, self._port())
        store = PrefixStore(f"agents/{self._number}", nodes.rendezvous.store)
        return RendezvousInfo(store, nodes.index, nodes.count, info)

    def _port(self) -> int:
        """Return the port of the workers' store: the nodes' own for the first launch, another for each later one,
        because process groups leave their keys in the store.
        """
        rendezvous, key = self._nodes.rendezvous, f"workers/{self._number}"
        if not self._number:
            return rendezvous.store_port
        if rendezvous.index == 0:
            self._store = store = host_store(rendezvous.address, 0, "")
            rendezvous.publish(key, store.port)
        return int(rendezvous.wait_for(key, self._nodes.poll))

    def num_nodes_waiting(self) -> int:
        self._nodes.poll()
        return super().num_nodes_waiting()


class _ErrorFiles(LogsSpecs):
    """Tell the agent where errors are written; the workers redirect their output themselves."""

    def __init__(self, logs: Path) -> None:
        super().__init__(log_dir=str(logs))
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        files = {local: str(error_file(self._logs, int(variables["RANK"]))) for local, variables in envs.items()}
        for local, variables in envs.items():
            variables["TORCHELASTIC_ERROR_FILE"] = files[local]
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=files)

    @property
    def root_log_dir(self) -> str:
        return str(self._logs)


class _Agent(LocalElasticAgent):
    """Inform the workers that one has failed before the others are ended."""

    def __init__(self, flags: stop.Flags, rendezvous: _OneNode, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._flags = flags
        self._workers_of = rendezvous

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # The workers are ended during the call below.
        if any(self._workers_of.exit_codes(0).values()):
            self._flags.closing.value = 1
        return super()._monitor_workers(worker_group)


def _agent(
    rendezvous: _OneNode, processes: int, logs: Path, arguments: tuple[Any, ...], flags: stop.Flags
) -> LocalElasticAgent:
    # Not SIGINT and SIGTERM: the agent would kill a worker that takes over 30 s to write its checkpoint.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    spec = WorkerSpec(
        role="worker",
        local_world_size=processes,
        rdzv_handler=rendezvous,
        entrypoint=_worker,
        args=arguments,
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        local_addr=LOOPBACK,
    )
    return _Agent(
        flags,
        rendezvous,
        spec,
        logs_specs=_ErrorFiles(logs),
        start_method=START_METHOD,
        exit_barrier_timeout=_BARRIER_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )


def _agent_log(nodes: Nodes | None) -> str:
    return f"launcher-{nodes.index}.log" if nodes else "launcher.log"


def _kill_workers(nodes: Nodes | None) -> None:
    if nodes is not None:
        nodes.killed()
    raise SignalException("killed by a second ctrl-C", sigval=signal.SIGKILL)


@contextmanager
def _agent_environment(loopback: bool) -> Any:
    """Set the variables that the agent and its workers read; the user's own values are kept."""
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    wanted = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # see preload_libraries
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    if loopback:
        wanted |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    quit_handler = signal.getsignal(signal.SIGQUIT)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, quit_handler)
        for name in added:
            os.environ.pop(name, None)


def _show_cursor() -> None:
    """Show the cursor: a killed worker may have hidden it for its progress bar."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r")


def _started_as(worker: multiprocessing.process.BaseProcess) -> int:
    return int(worker.name.rpartition("-")[2])  # ForkProcess-12: pids may wrap around, these do not
