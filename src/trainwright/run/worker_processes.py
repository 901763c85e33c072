"""The worker processes of one launch on this machine: started, looked at, and ended.

Workers are forked from a parent that has already imported the libraries, and find each other by torchrun's variables
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from trainwright.errors import EXIT_FINISHED, EXIT_STOPPED, EXIT_TRAINING, TrainwrightError
from trainwright.run.group.addresses import LOOPBACK
from trainwright.run.process import count_allowed_threads, enter_process, freeze_for_forks
from trainwright.run.shutdown import failure, stop
from trainwright.run.shutdown.failure import EndedBySignal, EndedEarly, Slot
from trainwright.run.shutdown.stop import START_METHOD
from trainwright.utils.text import say

# A process that the kernel has not ended so long after SIGKILL waits for a device or a disk.
_END_SECONDS = 10.0
_CLOSED = (EXIT_FINISHED, EXIT_STOPPED)


@dataclass(frozen=True)
class WorkerRanks:
    """The ranks of a launch on this machine.

    Attributes:
        first: the lowest of them; they follow each other.
        processes: how many they are.
        size: the number of ranks on all machines, each of which has as many.
        port: of the loopback interface, where the launch's store is.
    """

    first: int
    processes: int
    size: int
    port: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.processes))

    @property
    def is_alone(self) -> bool:
        """Whether there is no other machine."""
        return self.processes == self.size

    def variables(self, rank: int, launch: str) -> dict[str, str]:
        """Return torchrun's variables of a worker; ``launch`` is a name of this launch."""
        node, nodes = str(self.first // self.processes), str(self.size // self.processes)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.first),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": nodes,
            "ROLE_NAME": "worker",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": launch,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


class Workers:
    """The processes that run ``entry``, one for each of the ``ranks``; they are started at once.

    Args:
        entry: returns EXIT_FINISHED or EXIT_STOPPED, or raises; where processes are spawned instead of forked (not
            Linux) it must be picklable.
        logs: directory for rank-<r>.log, and rank-<r>.error.json of a worker that raised.
    """

    def __init__(self, entry: Callable[[], int], ranks: WorkerRanks, logs: Path, flags: stop.Flags) -> None:
        self.slots = {rank: failure.create_slot() for rank in ranks}
        self._killed: set[int] = set()
        name = uuid.uuid4().hex
        defaults = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # see preload_libraries
        if ranks.is_alone:
            loopback = "lo" if sys.platform.startswith("linux") else "lo0"
            defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        context: Any = multiprocessing.get_context(START_METHOD)
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        with freeze_for_forks():
            for rank in ranks:
                error_file = str(failure.locate_error_file(logs, rank))
                variables = {"TORCHELASTIC_ERROR_FILE": error_file, **ranks.variables(rank, name)}
                arguments = (entry, logs, os.getpid(), flags, self.slots[rank], {**defaults, **os.environ, **variables})
                process = context.Process(target=_work, args=arguments)
                try:
                    process.start()
                except OSError:  # the next one may have a process too many
                    self.kill()
                    raise
                self._processes[rank] = process

    @property
    def alive(self) -> dict[int, int]:
        """The process ids of those that have not ended, by rank."""
        return {rank: process.pid or 0 for rank, process in self._processes.items() if process.is_alive()}

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """The exit codes by rank, negative for signals; None: it has not ended, or was killed here."""
        return {rank: self._exit_code(rank) for rank in self._processes}

    @property
    def have_failed(self) -> bool:
        """Whether one has failed."""
        return any(code not in (None, *_CLOSED) for code in self.exit_codes.values()) or bool(self.early_ends)

    @property
    def early_ends(self) -> dict[int, EndedEarly]:
        """The errors, by rank, of those that ended as if they were done, and have not noted it."""
        codes = self.exit_codes.items()
        return {r: EndedEarly(r, code) for r, code in codes if code in _CLOSED and not self.slots[r].value}

    def wait(self, seconds: float) -> None:
        """Wait until one has ended, at most so long."""
        wait([process.sentinel for process in self._processes.values() if process.is_alive()], seconds)

    def kill(self) -> None:
        """Kill those that have not ended."""
        self._killed |= self.alive.keys()
        for process in self._processes.values():
            process.kill()
        end = time.monotonic() + _END_SECONDS
        for rank, process in self._processes.items():
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                say(f"rank {rank} (process {process.pid}) was killed and does not end", file=sys.stderr)

    def _exit_code(self, rank: int) -> int | None:
        code = self._processes[rank].exitcode
        if code == -signal.SIGKILL and rank in self._killed:
            return None
        # What a library does when the interpreter ends says nothing about the run.
        return code if code is None else failure.read_slot_code(self.slots[rank], code)


def _work(
    entry: Callable[[], int], logs: Path, parent: int, flags: stop.Flags, slot: Slot, variables: dict[str, str]
) -> None:
    """Run in every worker."""
    os.environ.update(variables)
    rank = int(os.environ["RANK"])
    enter_process(logs / f"rank-{rank}.log", parent=parent, keep_console=rank == 0)
    faulthandler.enable()
    # Recorded like an exception: errors of other ranks about broken connections follow from it.
    stop.follow_launcher(flags, lambda number: failure.record_exception(EndedBySignal(rank, number), slot))
    torch.set_num_threads(count_allowed_threads())
    try:
        code = failure.run_to_end(entry, rank)
    except Exception as error:
        failure.record_exception(error, slot)
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit immediately: the other ranks wait for this one, and its threads may not be joinable any more.
        os._exit(error.exit_code if isinstance(error, TrainwrightError) else EXIT_TRAINING)
    failure.set_done(slot, code)
    sys.exit(code)
