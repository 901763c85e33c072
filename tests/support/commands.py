"""Runs the command line and launches of real worker processes, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
# Seconds after which what a test waits for is taken not to come. Nothing here is a race against the processor: more of
# them, for a machine that is slow or has much else to do, come with `--timeout` (conftest.py).
PATIENCE = 400.0
# What the tests take this machine for, whatever it is.
MACHINE = ROOT / "tests" / "support" / "machine.json"


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: this checkout's package, one thread a process, no colors, no hub.

    What takes long is not said, as how long it takes is up to the machine.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    fixed = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    fixed["TRAINWRIGHT_QUIET"] = "1"
    return {**os.environ, **fixed, "PYTHONPATH": path, **more}


def trainwright(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `trainwright ARGUMENTS` in `cwd` to its end, in a forked process."""
    return _forked({"arguments": arguments, "environment": variables}, cwd)


def python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python FILE …`, `python -c CODE …` or `python -m MODULE …` in `cwd` to its end, in a forked process that has
    imported torch."""
    return _forked({"python": arguments, "arguments": arguments, "environment": variables}, cwd)


def function(name: str, *arguments: Any, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call `module:function` in `cwd`, in a forked process."""
    return _forked({"function": name, "arguments": arguments, "environment": variables}, cwd)


def _forked(request: dict[str, Any], cwd: Path) -> subprocess.CompletedProcess[str]:
    from tests.support.forked import fork_server

    files = Path(tempfile.mkdtemp(prefix="trainwright-command-"))
    try:
        running = fork_server().start(request, files / "files", cwd)
        try:
            ended = running.wait()
        finally:
            if not running.ended:
                running.kill()
    finally:
        shutil.rmtree(files)
    return subprocess.CompletedProcess(request["arguments"], ended.code, ended.stdout, ended.stderr)


def machine_file(directory: Path, **changes: Any) -> str:
    """A file in ``directory`` with the machine of the tests, but for ``changes``; for TRAINWRIGHT_MACHINE."""
    file = directory / "machine.json"
    file.write_text(json.dumps({"machine": {**json.loads(MACHINE.read_text())["machine"], **changes}}))
    return str(file)


@contextlib.contextmanager
def started(*command: str, cwd: Path, output: Path | None = None, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a Python process (`command` follows the interpreter), in a process group of its own.

    Its output goes to the file `output` when given (a pipe nobody reads would block it). On leaving, what is
    left of the group is killed, and then of its descendants.
    """
    target = output.open("w") if output else subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(**variables),
        stdout=target,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family = [psutil.Process(process.pid)]
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member in family[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(PATIENCE)


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that `pid` started, theirs included."""
    return psutil.Process(pid).children(recursive=True)


def wait_for(what: Callable[[], T], every: float = 0.02) -> T:
    """The first true value of `what()`; AssertionError when there is none in `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while not (value := what()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s in vain"
        time.sleep(every)
    return value


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within `PATIENCE`; one that is dead and only not yet reaped has ended."""

    def ended(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if all(ended(process) for process in processes):
            return True
        time.sleep(0.05)
    return False
