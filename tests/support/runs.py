"""Training runs of real worker processes, forked from one process that has imported the libraries already."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT
from tests.support.forked import Finished as Finished
from tests.support.forked import Started, fork_server
from trainwright.engine.event_reader import EventRecord, read_events

TINY = ROOT / "recipes" / "sft" / "tiny.yaml"
# Some 200 rows that do not depend on the Python version, as the built-in dataset does.
ROWS = ROOT / "tests" / "engine" / "golden" / "rows.jsonl"
ON_ROWS = f"data.train={ROWS}"


@dataclass
class Runs:
    """Starts commands; close it at the end. `directory` holds everything they write.

    `shared` is of all processes of the tests: it says where finished runs are.
    """

    directory: Path
    shared: Path
    _count: int = 0
    _memory: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _started: list[Started] = field(default_factory=list)

    def close(self) -> None:
        """End what a failed test has left running."""
        for started in self._started:
            if not started.ended:
                started.kill()

    def command(self, *arguments: str, cwd: Path | None = None, **variables: str) -> Started:
        """Start `trainwright ARGUMENTS`."""
        return self._start({"arguments": arguments, "environment": variables}, cwd)

    def train(self, *overrides: str, recipe: Path = TINY) -> Started:
        """Start a run of `recipe` in a new directory, `run` of what is returned; without TensorBoard's files."""
        run = self.new_directory("run")
        fixed = (f"logging.run_directory={run}", "logging.observers.tensorboard=false")
        started = self.command("train", str(recipe), *fixed, *overrides)
        started.run = run
        return started

    def trained(self, *overrides: str, recipe: Path = TINY) -> Path:
        """The directory of a finished run. The same recipe and overrides give the same run: only read it."""
        key = (str(recipe), *overrides)
        if key not in self._memory:
            file = self.shared / hashlib.sha256(repr(key).encode()).hexdigest()
            with file.open("a+") as found:
                fcntl.flock(found, fcntl.LOCK_EX)  # another process may be training it
                found.seek(0)
                if not (run := found.read()):
                    found.write(run := str(self._finished(*overrides, recipe=recipe)))
            self._memory[key] = Path(run)
        return self._memory[key]

    def _finished(self, *overrides: str, recipe: Path) -> Path:
        started = self.train(*overrides, recipe=recipe)
        ended = started.wait()
        assert ended.code == 0, ended.stdout + ended.stderr
        assert started.run is not None
        return started.run

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
            request = {"function": name, "arguments": arguments, "environment": variables}
            workers.append(self._start(request, None))
        try:
            for worker in workers:
                ended = worker.wait()
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
        variables = {"TRAINWRIGHT_CACHE": str(self.directory / "cache"), **request["environment"]}
        self._started.append(fork_server().start({**request, "environment": variables}, files, cwd))
        return self._started[-1]


def events(run: Path, kind: str) -> list[EventRecord]:
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
