"""A copy of the repository in which tests are run with one bug planted at a time."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.mutation_list import Mutation

# Of a single test, and of all tests of one bug; what takes longer is taken for a hang.
TEST_SECONDS, RUN_SECONDS = 180, 900
NO_TESTS = 5  # pytest: none has the marks
_HUNG = "Timeout"
_WORKER = Path(__file__).with_name("mutation_worker.py")


@dataclass(frozen=True)
class Outcome:
    """``result``: passed, failed, hung (a test, or all of them, ran out of time) or broken (no test could run).

    ``test``: the first that failed, with what it said in ``message``; of a broken run the end of its output.
    """

    result: str
    seconds: float
    test: str = ""
    message: str = ""


class Copy:
    """The working tree once more, in ``directory``; the tree itself is never changed. Close it at the end."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._tree = directory / "tree"
        self._scratch = directory / "scratch"
        self._planted = 0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (root / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self._tree / name)
        self._worker = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            cwd=self._tree,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the tests that may still run, from any thread."""
        _end(self._worker.pid)
        self._worker.wait()

    def with_bug(self, mutation: Mutation) -> Outcome:
        """Run the bug's tests with the bug in its file."""
        file = self._tree / mutation.file
        text = file.read_text(encoding="utf-8")
        before = file.stat()
        file.write_text(mutation.applied(text), encoding="utf-8")
        # A compiled module is known by its source's size and second: of no two bugs may both be the same.
        self._planted += 1
        os.utime(file, (before.st_atime, before.st_mtime + 2 * self._planted))
        try:
            outcome = self.run(mutation.tests)
            return self.run(mutation.tests, marks="slow") if outcome.result == "passed" else outcome
        finally:
            file.write_text(text, encoding="utf-8")
            os.utime(file, (before.st_atime, before.st_mtime))

    def run(self, tests: Sequence[str], *, stop: bool = True, marks: str = "not slow") -> Outcome:
        """Run the tests with these marks one after another; with ``stop`` up to the first that fails."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        report, output = self._scratch / "report.xml", self._scratch / "output"
        options = ["-q", "-m", marks, "-p", "no:cacheprovider", "--tb", "short", "--rootdir", str(self._tree)]
        options += ["--timeout", str(TEST_SECONDS), f"--junitxml={report}", *(["-x"] if stop else [])]
        begun = time.monotonic()
        code = self._ended([*options, *tests], output)
        seconds = time.monotonic() - begun
        if code is None:
            return Outcome("hung", seconds, message=f"no end after {RUN_SECONDS} s")
        if code in (0, NO_TESTS):
            return Outcome("passed", seconds)
        if code != 1 or (failed := _first_failure(report)) is None:
            said = output.read_text(errors="replace")[-3000:] if output.is_file() else ""
            return Outcome("broken", seconds, message=said)
        test, message = failed
        return Outcome("hung" if _HUNG in message else "failed", seconds, test, message)

    def _ended(self, arguments: Sequence[str], output: Path) -> int | None:
        """The exit code of pytest; None where it did not end in time."""
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.write(json.dumps([arguments, str(output)]) + "\n")
        self._worker.stdin.flush()
        pid = int(self._worker.stdout.readline())
        in_time = bool(select.select([self._worker.stdout], [], [], RUN_SECONDS)[0])
        if not in_time:
            _end(pid)
        code = int(self._worker.stdout.readline())
        return code if in_time else None

    def _environment(self) -> dict[str, str]:
        fixed = {
            "PYTHONPATH": str(self._tree / "src"),
            "TRAINWRIGHT_CACHE": str(self._scratch / "cache"),
            "TMPDIR": str(self._scratch),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        return {**os.environ, **fixed}


def _first_failure(report: Path) -> tuple[str, str] | None:
    """The first test that failed, or could not be set up, and the first line of why."""
    if not report.is_file():
        return None
    for case in ElementTree.parse(report).iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            if found.get("message") == "collection failure":
                return None
            name = f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}"
            return name, (found.get("message") or "").strip().split("\n")[0][:300]
    return None


def _end(pid: int) -> None:
    """End a process and all that it has started."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
