"""Have a run's page written while it trains, by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from trainwright.observe.reader import EventRecord

NEEDS = "vl_convert"
_PAUSE = 300.0  # seconds between two pages of a run that trains
_SHORT = 60.0  # shorter runs get a page only if it is asked for
_LAST_SECONDS = 60.0
_NICE = 10


class ReportObserver:
    """Observer that writes ``report.html`` now and then, and when the run ends.

    Args:
        always: also for runs of less than a minute.
    """

    def __init__(self, run: Path, *, always: bool) -> None:
        self._run = run
        self._always = always
        self._begun = self._written = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def is_available(cls) -> bool:
        """Return whether the package with the script of charts is installed."""
        return find_spec(NEEDS) is not None

    def __call__(self, event: EventRecord) -> None:
        """Begin to write the page if it is time; at the end of the run, wait for it."""
        now = time.monotonic()
        if event["event"] == "finish":
            if self._always or now - self._begun >= _SHORT:
                self._wait()
                self._write()
                self._wait()
        elif event["event"] in ("evaluate", "checkpoint", "fault") and now - self._written >= _PAUSE:
            self._write()

    def _write(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return  # a slow disk, or a run with very many events
        self._written = time.monotonic()
        command = [sys.executable, "-m", "trainwright", "report", str(self._run)]
        with suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)

    def _wait(self) -> None:
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_SECONDS)
