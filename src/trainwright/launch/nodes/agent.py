"""Torch's elastic agent for the workers of one launch on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainwright.launch.ending import stop
from trainwright.launch.ending.failure import error_file
from trainwright.launch.ending.stop import CLOSED_BY_LAUNCHER, START_METHOD
from trainwright.launch.group.addresses import LOOPBACK
from trainwright.launch.group.rendezvous import host_store
from trainwright.launch.nodes.nodes import Nodes

_MONITOR_SECONDS = 0.05
_SHUTDOWN_SECONDS = 10
# The nodes wait for each other afterwards and notice when one is gone; the agent would not.
_BARRIER_SECONDS = 0.1


class OneNode(RendezvousHandler):
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
        self._closed: set[multiprocessing.process.BaseProcess] = set()

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "trainwright"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers are to use the store that was given to the agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the only place, with a new store."""
        self._store = store = host_store(LOOPBACK, 0, "")
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def num_nodes_waiting(self) -> int:
        """Return 0, after the checks."""
        # The agent calls this repeatedly while its workers run: poll them here.
        for check in self.checks:
            check()
        return 0

    def get_run_id(self) -> str:
        """Return a name of this launch."""
        # The agent's report names only one failed worker. It reads this name right after starting the workers, so keep
        # references to all of them here, for the exit code of each.
        if len(self._workers) < self._processes:
            self._workers = sorted(multiprocessing.active_children(), key=_started_as)
        return self._run_id

    def alive(self, first: int) -> dict[int, int]:
        """Return the pids by rank of the workers that have not ended; `first` is the lowest rank here."""
        return {rank: int(worker.pid or 0) for rank, worker in enumerate(self._workers, first) if worker.is_alive()}

    def exit_codes(self, first: int) -> dict[int, int | None]:
        """Return the exit codes by rank, negative for signals; `first` is the lowest rank here.

        A worker that the agent had to kill, as it did not end by itself after another had failed, has the same code as
        one that did.
        """
        killed = -signal.SIGKILL
        return {
            rank: CLOSED_BY_LAUNCHER if worker in self._closed and worker.exitcode == killed else worker.exitcode
            for rank, worker in enumerate(self._workers, first)
        }

    def close(self) -> None:
        """Note which workers have not ended: from now on the agent ends them."""
        self._closed = self._closed or {worker for worker in self._workers if worker.is_alive()}

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def shutdown(self) -> bool:
        """Return True: nothing is left to be done."""
        return True


class SeveralNodes(OneNode):
    """One of the agents of a launch on several nodes. Ranks follow the order of its nodes."""

    def __init__(self, nodes: Nodes) -> None:
        assert nodes.launch is not None, "node 0 has begun it"
        super().__init__(nodes.launch.spread.each)
        self._nodes = nodes
        self._launch = nodes.launch

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's place; nothing is exchanged, as node 0 has told all of them the same."""
        nodes, launch = self._nodes, self._launch
        nodes.running = True
        info = RendezvousStoreInfo(LOOPBACK, nodes.rendezvous.peers.reach(launch.port))
        members = launch.spread.nodes
        return RendezvousInfo(HashStore(), members.index(nodes.index), len(members), info)

    def num_nodes_waiting(self) -> int:
        """Look at the other nodes too."""
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
    """Inform the workers that one, or another node, has failed before they are ended."""

    def __init__(self, flags: stop.Flags, rendezvous: OneNode, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._flags = flags
        self._workers_of = rendezvous

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # The workers are ended during the call below.
        if any(self._workers_of.exit_codes(0).values()):
            self._close()
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *arguments: Any, **more: Any) -> None:
        self._close()
        super()._shutdown(*arguments, **more)

    def _close(self) -> None:
        self._workers_of.close()
        self._flags.closing.value = 1


def agent_of(
    rendezvous: OneNode,
    processes: int,
    logs: Path,
    worker: Callable[..., int],
    arguments: tuple[Any, ...],
    flags: stop.Flags,
) -> LocalElasticAgent:
    """Return the agent that runs ``worker`` with these arguments in ``processes`` processes."""
    # Not SIGINT and SIGTERM: the agent would kill a worker that takes over 30 s to write its checkpoint.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    spec = WorkerSpec(
        role="worker",
        local_world_size=processes,
        rdzv_handler=rendezvous,
        entrypoint=worker,
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


@contextmanager
def agent_environment(loopback: bool) -> Any:
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


def _started_as(worker: multiprocessing.process.BaseProcess) -> int:
    return int(worker.name.rpartition("-")[2])  # ForkProcess-12: pids may wrap around, these do not
