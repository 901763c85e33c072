"""Commands that run in processes forked from one that has imported the libraries already.

What is forked is the command line as a user runs it, without the seconds that importing takes: the launcher itself
forks its workers from a parent in just this state.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.commands import PATIENCE, ROOT, environment, wait_for


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Started:
    """A command that is running, in a process group of its own."""

    pid: int
    files: Path
    run: Path | None = None

    def wait(self) -> Finished:
        """Its end; AssertionError when it does not come."""
        status = self.files / "status"
        wait_for(status.exists)
        out, err = (self.files / name for name in ("stdout", "stderr"))
        return Finished(int(status.read_text()), out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))

    @property
    def ended(self) -> bool:
        return (self.files / "status").exists()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to every process of the command at once; with SIGKILL, see them gone."""
        os.killpg(self.pid, number)
        if number == signal.SIGKILL:
            wait_for(self._gone)

    def _gone(self) -> bool:
        """Whether its group has ended; a container's first process may never reap what has."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return not any(_is_alive_in(process, self.pid) for process in psutil.process_iter())

    def wait_for_step(self, step: int) -> None:
        """Until the events of the run have this step."""
        assert self.run is not None
        wanted = '"event": "step"', f'"step": {step},'
        events = self.run / "events.jsonl"

        def reached() -> bool:
            lines = events.read_text().splitlines() if events.exists() else []
            return any(all(part in line for part in wanted) for line in lines)

        wait_for(lambda: reached() or self.ended, every=0.002)
        assert not self.ended, f"the run ended before step {step}:\n{self.wait()}"


def _is_alive_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False


class ForkServer:
    """The process that forks; see fork_server.py. Processes that are forked from this one may use it too."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115

    def start(self, request: dict[str, Any], files: Path, cwd: Path | None = None) -> Started:
        """Fork a process for ``request``, in ``cwd`` or a new directory, ``files``, where its output goes.

        It has this process's environment with the request's.
        """
        files.mkdir()
        paths = {name: str(files / name) for name in ("stdout", "stderr", "status")}
        variables = environment(**request["environment"])
        whole = {**request, **paths, "cwd": str(cwd or files), "environment": variables}
        line = json.dumps(whole, default=str) + "\n"
        fcntl.lockf(self._lock, fcntl.LOCK_EX)  # of those that were forked from the process that has started it
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()
            return Started(int(self._read()), files)
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """End it; what it has forked goes on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        return line.strip()


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process, started when it is first asked for."""
    return ForkServer()
