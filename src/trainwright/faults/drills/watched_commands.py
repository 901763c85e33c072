"""Real commands: started with limits, watched from outside, including every process that they start."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.faults.drills.invariants import InvariantBroken
from trainwright.machine.allocator import peak_resident

LOOK_SECONDS = 0.004
# Seconds that processes of a command may outlive it.
_GONE_SECONDS = 20.0
_MARK = "TRAINWRIGHT_FAULT_TRIAL"


@dataclass(frozen=True)
class CommandResult:
    """How a command ended.

    Attributes:
        code: negative for signals.
        peak: the resident memory of its largest process, in bytes.
        at: when, in seconds since the epoch.
    """

    code: int
    text: str
    seconds: float
    peak: int
    at: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s:\n{self.text.strip()[-3000:]}"


def _begin(before: Callable[[], None] | None) -> None:
    """In the child: a hangup is not ignored because the campaign was started by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if before is not None:
        before()


class Command:
    """A command that runs in a session of its own; all that it starts is known by a mark in the environment.

    Args:
        before: called in the child before it becomes the command.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        output: Path,
        variables: Mapping[str, str],
        before: Callable[[], None] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.output = output
        self._started_at = time.monotonic()
        self._ended: CommandResult | None = None
        with output.open("wb") as stream:
            self._process = subprocess.Popen(
                arguments,
                cwd=cwd,
                env={**variables, _MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(_begin, before),
            )

    @property
    def pid(self) -> int:
        """Return the command's own process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""
        if self._ended is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = code
                text = self.output.read_text(errors="replace")
                self._ended = CommandResult(
                    code, text, time.monotonic() - self._started_at, peak_resident(usage.ru_maxrss), time.time()
                )
        return self._ended is not None

    def wait(self, seconds: float) -> CommandResult:
        """Return how it ended. Raises InvariantBroken if it does not end, or if a process that it started survives."""
        deadline = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > deadline:
                text = self.output.read_text(errors="replace")
                tree = self.describe()
                self.kill()
                raise InvariantBroken(f"no end in {seconds:.0f} s; it had said:\n{text[-2000:]}\nprocesses: {tree}")
            time.sleep(LOOK_SECONDS)
        assert self._ended is not None
        deadline = time.monotonic() + _GONE_SECONDS
        while survivors := self.processes():
            if time.monotonic() > deadline:
                tree = self.describe()
                self.kill()
                raise InvariantBroken(f"{len(survivors)} processes live on: {tree}; {self._ended}")
            time.sleep(0.05)
        return self._ended

    def processes(self) -> list[int]:
        """Return the living processes of the command, itself included."""
        marker = f"{_MARK}={self.mark}".encode()
        pids = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                with contextlib.suppress(OSError):
                    alive = (directory / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                    if alive and marker in (directory / "environ").read_bytes():
                        pids.append(int(directory.name))
        return pids

    def workers(self) -> dict[int, int]:
        """Return the process of each rank, known by the log that it writes to."""
        workers = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                log = re.fullmatch(r"rank-(\d+)\.log", Path(os.readlink(f"/proc/{pid}/fd/1")).name)
                if log:
                    workers[int(log[1])] = pid
        return dict(sorted(workers.items()))

    def describe(self) -> str:
        """Return its processes, each with its state."""
        lines = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                ranks = [rank for rank, worker in self.workers().items() if worker == pid]
                lines.append(f"{pid} {state} {'rank ' + str(ranks[0]) if ranks else ''}".strip())
        return ", ".join(lines) or "none"

    def send(self, number: signal.Signals, pid: int | None = None) -> None:
        """Send a signal to the command's own process, or to another one of it; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid if pid is None else pid, number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to its process group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill every process of it."""
        deadline = time.monotonic() + 10
        while (survivors := self.processes()) and time.monotonic() < deadline:
            for pid in survivors:
                self.send(signal.SIGKILL, pid)
            time.sleep(0.02)
        if self._ended is None:
            self.send(signal.SIGKILL)
            while not self.ended and time.monotonic() < deadline:
                time.sleep(0.02)


# The command and not the API: faults hit its process, and its exit codes and messages are what is checked.
TRAINWRIGHT = (sys.executable, "-m", "trainwright")
