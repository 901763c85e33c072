"""Worker processes on this machine, through torch's elastic agent, on a free port of the loopback interface.

The agent gives the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, …), watches the workers and
takes the rest down when one fails. Around it: workers forked from a parent that has already imported the
libraries, one log a rank, a graceful stop, and the first failure told once.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, EXIT_TRAINING, TrainwrightError
from trainwright.launch import stop
from trainwright.launch.failure import RankErrorHandler, error_file, first_failure
from trainwright.launch.process import enter_process, threads_allowed
from trainwright.launch.stop import START_METHOD, Stopping

_BACKEND = "trainwright-loopback"
_LOOPBACK = "127.0.0.1"
_MONITOR_SECONDS = 0.05
_STORE_TIMEOUT = timedelta(minutes=15)


def launch(entry: Callable[[], int], *, processes: int, logs: Path, stopping: Stopping) -> int:
    """Run `entry` in `processes` workers and return the exit code of the whole, having told of a failure.

    `entry` returns EXIT_FINISHED or EXIT_STOPPED, or raises; where processes are spawned instead of forked
    (not Linux) it must be picklable. `logs` receives rank-<r>.log, launcher.log, and rank-<r>.error.json
    for a worker that raised. `stopping` is entered by the caller.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(processes):
        error_file(logs, rank).unlink(missing_ok=True)
    rendezvous = _Loopback(processes)
    killed_for_memory = _memory_kills()
    try:
        with _quiet_agent(logs / "launcher.log"), _agent_environment():
            stopping.kill = _kill_workers
            arguments = (entry, logs, os.getpid(), stopping.flag)
            codes = elastic_launch(_configuration(rendezvous, processes, logs), _worker)(*arguments)
    except ChildFailedError as error:
        codes = rendezvous.exit_codes() | {rank: f.exitcode for rank, f in error.failures.items()}
        failure = first_failure(logs, processes, codes, _memory_kills() > killed_for_memory)
        _tell(failure.message)
        return failure.exit_code
    except SignalException:
        return EXIT_STOPPED if stopping.killed else EXIT_TRAINING
    return _joint_code([int(code or 0) for code in codes.values()])


def _joint_code(codes: list[int]) -> int:
    others = [code for code in codes if code not in (EXIT_FINISHED, EXIT_STOPPED)]
    if others:
        return others[0]
    return EXIT_STOPPED if EXIT_STOPPED in codes else EXIT_FINISHED


def _worker(entry: Callable[[], int], logs: Path, parent: int, flag: stop.Flag) -> int:
    rank = int(os.environ["RANK"])
    enter_process(logs / f"rank-{rank}.log", parent=parent, keep_console=rank == 0)
    stop.follow_launcher(flag)
    torch.set_num_threads(threads_allowed())
    try:
        return record(entry, RankErrorHandler())() or EXIT_FINISHED
    except Exception as error:
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: the other ranks wait for this one, and its threads may not be joinable any more.
        os._exit(error.exit_code if isinstance(error, TrainwrightError) else EXIT_TRAINING)


class _Loopback(RendezvousHandler):
    """One agent alone: its store listens on a loopback port that the kernel picks, so none can collide.

    Torch's own static rendezvous wants a port chosen beforehand and listens on every interface; its c10d
    one runs a thread, which a parent that forks should not have.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None
        self._workers: list[multiprocessing.process.BaseProcess] = []

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((_LOOPBACK, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        # The agent's report names one failed worker only. It asks for this name when it has just started
        # the workers: the moment to keep hold of all of them, for the exit code of each.
        if len(self._workers) < self._processes:
            self._workers = sorted(multiprocessing.active_children(), key=_started_as)
        return self._run_id

    def exit_codes(self) -> dict[int, int | None]:
        """Exit codes by rank, negative for signals."""
        return {rank: worker.exitcode for rank, worker in enumerate(self._workers)}

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def _given_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = parameters.config["handler"]
    return handler


rendezvous_handler_registry.register(_BACKEND, _given_handler)


class _ErrorFiles(LogsSpecs):
    """Tells the agent where errors are written; the workers redirect their output themselves."""

    def __init__(self, logs: Path) -> None:
        super().__init__(log_dir=str(logs))
        self._logs = logs

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        files = {rank: str(error_file(self._logs, rank)) for rank in envs}
        for rank, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = files[rank]
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=files)

    @property
    def root_log_dir(self) -> str:
        return str(self._logs)


def _configuration(rendezvous: _Loopback, processes: int, logs: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=rendezvous.get_run_id(),
        role="worker",
        rdzv_backend=rendezvous.get_backend(),
        rdzv_endpoint=_LOOPBACK,
        rdzv_configs={"handler": rendezvous},
        local_addr=_LOOPBACK,
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        start_method=START_METHOD,
        logs_specs=_ErrorFiles(logs),
        # Not SIGINT and SIGTERM: the agent would kill a worker that takes over 30 s to write its checkpoint.
        signals_to_handle="SIGQUIT",
    )


def _kill_workers() -> None:
    raise SignalException("killed by a second ctrl-C", sigval=signal.SIGKILL)


@contextmanager
def _agent_environment() -> Any:
    """What the agent and its workers read from the environment; the user's own values stay."""
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    wanted = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # see preload_libraries
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    quit_handler = signal.getsignal(signal.SIGQUIT)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, quit_handler)
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _quiet_agent(log: Path) -> Any:
    """The agent's own reports of a failure go to a file: the console gets ours, once."""
    handler = logging.FileHandler(log, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()


def _memory_kills() -> int:
    """How many processes the kernel has killed for memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _tell(message: str) -> None:
    # A worker that drew a progress bar has hidden the cursor and may have been killed since.
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r")
    print(f"error: {message}", file=sys.stderr, flush=True)


def _started_as(worker: multiprocessing.process.BaseProcess) -> int:
    return int(worker.name.rpartition("-")[2])  # ForkProcess-12: pids may wrap around, these do not
