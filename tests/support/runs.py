"""Training runs of real worker processes, forked from one process that has imported the libraries already.

A forked run is the command line as a user runs it, without the seconds that importing takes: the launcher itself
forks its workers from a parent in just this state.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT, environment, wait_for
from trainwright.observe.reader import Event, read_events

TINY = ROOT / "recipes" / "sft" / "tiny.yaml"
# Some 200 rows that do not depend on the Python version, as the built-in dataset does.
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
ON_ROWS = f"data.train={ROWS}"


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

    def wait(self, seconds: float = 200) -> Finished:
        """Its end; AssertionError when it does not come."""
        status = self.files / "status"
        wait_for(status.exists, seconds)
        out, err = (self.files / name for name in ("stdout", "stderr"))
        return Finished(int(status.read_text()), out.read_text(), err.read_text())

    @property
    def ended(self) -> bool:
        return (self.files / "status").exists()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to every process of the command at once; with SIGKILL, see them gone."""
        os.killpg(self.pid, number)
        if number == signal.SIGKILL:
            wait_for(self._gone)

    def _gone(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def wait_for_step(self, step: int, seconds: float = 100) -> None:
        """Until the events of the run have this step."""
        assert self.run is not None
        wanted = '"event": "step"', f'"step": {step},'
        events = self.run / "events.jsonl"

        def reached() -> bool:
            lines = events.read_text().splitlines() if events.exists() else []
            return any(all(part in line for part in wanted) for line in lines)

        wait_for(lambda: reached() or self.ended, seconds, every=0.002)
        assert not self.ended, f"the run ended before step {step}:\n{self.wait()}"


@dataclass
class Runs:
    """Starts commands; close it at the end. `directory` holds everything they write."""

    directory: Path
    _server: subprocess.Popen[str] = field(init=False)
    _count: int = 0
    _memory: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            cwd=ROOT,
            env=environment(TRAINWRIGHT_CACHE=str(self.directory / "cache")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def close(self) -> None:
        """End the server, and what a failed test has left running."""
        for started in self._started:
            if not started.ended:
                started.kill()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)

    def command(self, *arguments: str, cwd: Path | None = None, cores: int | None = None, **variables: str) -> Started:
        """Start `trainwright ARGUMENTS`. `cores` limits it to that many."""
        return self._start({"arguments": arguments, "cores": cores, "environment": variables}, cwd)

    def train(self, *overrides: str, recipe: Path = TINY, cores: int | None = None) -> Started:
        """Start a run of `recipe` in a new directory, `run` of what is returned; without TensorBoard's files."""
        run = self.new_directory("run")
        fixed = (f"logging.run_directory={run}", "logging.tensorboard=false")
        started = self.command("train", str(recipe), *fixed, *overrides, cores=cores)
        started.run = run
        return started

    def trained(self, *overrides: str, recipe: Path = TINY) -> Path:
        """The directory of a finished run. The same recipe and overrides give the same run: only read it."""
        key = (str(recipe), *overrides)
        if key not in self._memory:
            started = self.train(*overrides, recipe=recipe)
            ended = started.wait()
            assert ended.code == 0, ended.stdout + ended.stderr
            assert started.run is not None
            self._memory[key] = started.run
        return self._memory[key]

    def resume(self, run: Path, *overrides: str) -> Started:
        """Start `trainwright train --resume RUN`."""
        started = self.command("train", "--resume", str(run), *overrides)
        started.run = run
        return started

    def resumed(self, run: Path, *overrides: str) -> Path:
        """Continue a run to its end."""
        ended = self.resume(run, *overrides).wait()
        assert ended.code == 0, ended.stdout + ended.stderr
        return run

    def copied(self, run: Path) -> Path:
        """A run's directory once more, to be continued in another way."""
        return Path(shutil.copytree(run, self.new_directory("copy")))

    def function(self, name: str, *arguments: Any, processes: int = 1) -> None:
        """Call `module:function` in `processes` processes that can join a process group; all must return."""
        port = _free_port()
        workers = []
        for rank in range(processes):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            request = {"function": name, "arguments": arguments, "cores": None, "environment": variables}
            workers.append(self._start(request, None))
        try:
            for worker in workers:
                ended = worker.wait(100)
                assert ended.code == 0, ended.stdout + ended.stderr
        finally:
            for worker in workers:
                if not worker.ended:
                    worker.kill()

    def new_directory(self, kind: str) -> Path:
        """A name that is not taken."""
        self._count += 1
        return self.directory / f"{kind}-{self._count}"

    def _start(self, request: dict[str, Any], cwd: Path | None) -> Started:
        files = self.new_directory("command")
        files.mkdir()
        paths = {name: str(files / name) for name in ("stdout", "stderr", "status")}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({**request, **paths, "cwd": str(cwd or files)}, default=str) + "\n")
        self._server.stdin.flush()
        self._started.append(Started(int(self._read()), files))
        return self._started[-1]

    def _read(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server has ended"
        return line.strip()


def events(run: Path, kind: str) -> list[Event]:
    """A run's events of one kind, without what was done over after a resume."""
    return [event for event in read_events(run / "events.jsonl") if event["event"] == kind]


def column(run: Path, name: str) -> list[Any]:
    """One field of every step of a run; the steps must be complete and in order."""
    steps = events(run, "step")
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    return [event[name] for event in steps]


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest relative difference of two series."""
    assert len(one) == len(other)
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
