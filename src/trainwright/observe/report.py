"""A run as a page: written on request, and while the run trains by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from os import PathLike
from pathlib import Path

from trainwright.engine.event_reader import EventRecord
from trainwright.errors import RequestError
from trainwright.observe.specs import REPORT
from trainwright.run.observers.hooks import ObservedRun
from trainwright.utils.paths import expand_user_path, write_file

FILE = "report.html"
_ENDED = "TRAINWRIGHT_RUN_ENDED"  # set for the process that writes the last page, while the launch still locks the run
_PAUSE = 300.0  # seconds between two pages of a run that trains
_SHORT = 60.0  # shorter runs get a page only if it is asked for
_LAST_SECONDS = 60.0
_NICE = 10


def report(run: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write a run as one HTML page that needs no network; what ``trainwright report`` does.

    Args:
        run: a run directory, of a run that has ended or is training.
        out: where to write. Default: ``report.html`` in the run directory.

    Returns:
        The file.

    Raises:
        RequestError: the directory is not a run's, the file cannot be written, or vl-convert-python is missing.

    Examples:
        >>> import trainwright as tw
        >>> tw.report("runs/tiny").name
        'report.html'
    """
    from trainwright.observe.reports.figures import RunFigures
    from trainwright.observe.reports.page import build_report

    figures = RunFigures.read(Path(run), ended=_ENDED in os.environ)
    file = figures.directory / FILE if out is None else expand_user_path(out)
    page = build_report(figures)
    try:
        write_file(file, page)
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}") from None
    return file


def build_observer(run: ObservedRun, setting: bool | str) -> ReportObserver | None:
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
                _wait(self._process)
                self._write(ended=True)
                _wait(self._process)
        elif event["event"] in ("evaluate", "checkpoint", "fault") and now - self._written >= _PAUSE:
            self._write()

    def _write(self, *, ended: bool = False) -> None:
        if self._process is not None and self._process.poll() is None:
            return  # a slow disk, or a run with very many events
        self._written = time.monotonic()
        self._process = _start_process(self._run, ended=ended)


def write_after_failure(run: Path, setting: bool | str, seconds: float, waits: bool) -> None:
    """Write the page of a run whose processes have failed, so that it does not say that the run trains.

    Args:
        seconds: how long the launch has lasted.
        waits: until the page is written.
    """
    is_long = seconds >= _SHORT or (run / FILE).is_file()
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
            env={**os.environ, _ENDED: "1"} if ended else None,
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        return process
    return None


def _wait(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_SECONDS)
