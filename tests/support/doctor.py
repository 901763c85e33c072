"""`trainwright doctor` on a machine with a fault that is really there, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PATIENCE, ROOT, environment, trainwright

NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="planting this fault takes a superuser and unshare"
)


@dataclass(frozen=True)
class Checked:
    """The exit code and the report of `trainwright doctor --json`."""

    code: int
    report: dict[str, Any]

    def check(self, name: str) -> dict[str, Any]:
        """What a check found."""
        (found,) = (check for check in self.report["checks"] if check["name"] == name)
        return found

    def finding(self, name: str, *words: str) -> dict[str, str]:
        """The only finding of a check that has all these words in `what`; it has a reason and a fix."""
        findings = self.check(name)["findings"]
        chosen = [one for one in findings if all(word in one["what"] for word in words)]
        assert len(chosen) == 1, findings
        assert chosen[0]["why"] and chosen[0]["fix"]
        return dict(chosen[0])


def checked(text: str, code: int) -> Checked:
    """Read what `--json` printed."""
    return Checked(code, json.loads(text))


def doctor(*arguments: str, cwd: Path, before: Sequence[str] = (), **variables: str) -> Checked:
    """Run `trainwright doctor ARGUMENTS --json`, started by the command `before` that plants the fault, if any."""
    done: subprocess.CompletedProcess[str]
    if before:
        command = [*before, sys.executable, "-m", "trainwright", "doctor", *arguments, "--json"]
        done = subprocess.run(
            command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE
        )
    else:  # without the time that imports take
        done = trainwright("doctor", *arguments, "--json", cwd=cwd, **variables)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return checked(done.stdout, done.returncode)


def in_shell(script: str, *namespaces: str) -> list[str]:
    """A command that runs a script, in namespaces of its own (options of unshare), and then what follows it.

    Skips where the script cannot be run.
    """
    own = ["unshare", *namespaces] if namespaces else []
    tried = subprocess.run([*own, "sh", "-ec", script], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this fault cannot be planted here: {tried.stderr.strip()}")
    return [*own, "sh", "-ec", f'{script}; exec "$@"', "sh"]


@contextlib.contextmanager
def group(controller: str, own: dict[str, str], unified: dict[str, str]) -> Iterator[str]:
    """A control group with limits: file names and contents of version 1 and 2; skips where none can be made.

    Yields the file to which a process writes its pid to go into it.
    """
    top = Path("/sys/fs/cgroup") / controller
    limits = own if top.is_dir() else unified
    directory = (top if top.is_dir() else top.parent) / f"trainwright-test-{os.getpid()}"
    try:
        directory.mkdir()
        for name, content in limits.items():
            (directory / name).write_text(content)
    except OSError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()
        pytest.skip(f"no such control group can be made here: {error}")
    try:
        yield str(directory / "cgroup.procs")
    finally:
        with contextlib.suppress(OSError):
            directory.rmdir()


def driver(directory: Path, *kind: str) -> list[str]:
    """A command that shows a GPU with faults to what follows it, on this machine; kinds: those of nvml.c."""
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("there is no C compiler to build a management library with")
    library = directory / "libnvidia-ml.so.1"
    flags = [f"-D{name}" for name in kind]
    command = ["cc", "-shared", "-fPIC", "-w", *flags, str(ROOT / "tests/support/nvml.c"), "-o", str(library)]
    subprocess.run(command, check=True)
    return ["env", f"LD_LIBRARY_PATH={directory}"]
