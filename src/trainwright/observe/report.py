"""Have a run's page written while it trains, by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from trainwright.engine.event_reader import EventRecord
from trainwright.observe.specs import REPORT
from trainwright.run.observers.observed import ObservedRun

ENDED = "TRAINWRIGHT_RUN_ENDED"  # set for the process that writes the last page, while the launch still locks the run
_PAUSE = 300.0  # seconds between two pages of a run that trains
_SHORT = 60.0  # shorter runs get a page only if it is asked for
_LAST_SECONDS = 60.0
_NICE = 10


def of_run(run: ObservedRun, setting: bool | str) -> ReportObserver | None:
    """Return the observer of a run; None with auto if the package with the script of charts is not installed."""
    always = setting is True
    return ReportObserver(run.directory, always=always) if always or REPORT.is_installed else None


class ReportObserver:
    """Observer that writes ``report.html`` now and then, and when the run ends.

    Args:
        always: also for runs of less than a minute.
    """

    def __init__(self, run: Path, *, always: bool) -> None:
        self._run = run
        self._always = always
        self._started_at = self._written = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, event: EventRecord) -> None:
        """Begin to write the page if it is time; at the end of the run, wait for it."""
        now = time.monotonic()
        if event["event"] == "finish":
            if self._always or now - self._started_at >= _SHORT:
                self._wait()
                self._write(ended=True)
                self._wait()
        elif event["event"] in ("evaluate", "checkpoint", "fault") and now - self._written >= _PAUSE:
            self._write()

    def _write(self, *, ended: bool = False) -> None:
        if self._process is not None and self._process.poll() is None:
            return  # a slow disk, or a run with very many events
        self._written = time.monotonic()
        self._process = _start_process(self._run, ended=ended)

    def _wait(self) -> None:
        _wait(self._process)


def write_after_failure(run: Path, setting: bool | str, seconds: float, waits: bool) -> None:
    """Write the page of a run whose processes have failed, so that it does not say that the run trains.

    Args:
        seconds: how long the launch has lasted.
        waits: until the page is written.
    """
    is_long = seconds >= _SHORT or (run / "report.html").is_file()
    if setting is True or (REPORT.is_installed and is_long):
        process = _start_process(run, ended=True)
        _wait(process if waits else None)


def _start_process(run: Path, *, ended: bool) -> subprocess.Popen[bytes] | None:
    """Begin to write the page. ``ended``: the training is over, although this launch still locks the run."""
    command = [sys.executable, "-P", "-m", "trainwright", "report", str(run)]
    with suppress(OSError):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, ENDED: "1"} if ended else None,
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        return process
    return None


def _wait(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_SECONDS)
