"""Show what a command is doing while there is no other output, once it takes long."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from trainwright.utils import text

# Shorter activities are not shown: in a log they would be lines of little use, on a terminal they would flicker.
QUIET_SECONDS = 2.0
_TERMINAL_SECONDS = 0.2
_TICK_SECONDS = 1.0
# A log gets another line about the same activity after this time, then after twice of it, and so on.
LOG_SECONDS = 30.0

_current: Activity | None = None


def begin_activity(what: str) -> None:
    """Report that ``what`` begins, or with "" that it is done; shown by the current `Activity`."""
    if _current is not None:
        _current.begin(what)


def report_progress(done: int, total: int) -> None:
    """Report how much of the activity that `begin_activity` has begun is done; shown by the current `Activity`."""
    if _current is not None:
        _current.progress(done, total)


class Activity:
    """Show the activities that `begin_activity` reports on ``stream``: with seconds on a terminal, else as a line.

    A context manager; an outer one shows nothing meanwhile. Activities under two seconds, on a terminal under 0.2
    (``quiet_seconds``), are not shown, and without a ``stream`` none are. It uses a thread, so do not fork processes
    meanwhile that write to the same stream.

    Args:
        until_output: end with the first line that is printed, or the first inner activity.
    """

    def __init__(
        self, stream: TextIO | None, what: str = "", quiet_seconds: float | None = None, *, until_output: bool = False
    ) -> None:
        self._stream = stream
        self._what = what
        self._fraction = ""
        self._quiet_seconds = quiet_seconds
        self._until_output = until_output
        self._lines_before = 0
        self._terminal = stream is not None and text.is_terminal(stream)
        self._ticker: Ticker | None = None
        self._drawn = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        global _current
        self._before, _current = _current, self
        if self._before is not None:
            self._before.pause()
        self.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        self.close()
        _current = self._before
        if _current is not None:
            _current.resume()

    def begin(self, what: str) -> None:
        """Show ``what`` from now on, and nothing for ""."""
        self.pause()
        self._what, self._fraction = what, ""
        self.resume()

    def progress(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parts of the activity are done."""
        self._fraction = f", {done / total:.0%}" if total else ""

    def say(self, line: str) -> None:
        """Print a line without disturbing the display."""
        with self._lock:
            text.say(line, file=self._stream)

    def pause(self) -> None:
        """Show nothing until `resume`."""
        if self._ticker is not None:
            self._ticker.stop()
        self._clear()
        if self._until_output:
            self.close()
            self._stream = None

    def resume(self) -> None:
        """Show the activity again, and its seconds from now on."""
        if self._stream is None or not self._what:
            return
        if self._ticker is None:
            self._ticker = Ticker(self._show)
        self._lines_before = text.count_said_lines()
        by_default = min(QUIET_SECONDS, _TERMINAL_SECONDS) if self._terminal else None
        self._ticker.begin(by_default if self._quiet_seconds is None else self._quiet_seconds)

    def close(self) -> None:
        """End the display and its thread."""
        if self._ticker is not None:
            self._ticker.close()
            self._ticker = None
        self._clear()

    def _show(self, seconds: float, for_log: bool) -> None:
        assert self._stream is not None
        if self._until_output and text.count_said_lines() != self._lines_before:
            return
        with self._lock:
            if self._terminal:
                text.draw(self._what, self._stream, f" … {text.format_duration(seconds)}{self._fraction}")
                self._drawn = True
            elif for_log:
                text.say(format_log_line(self._what, seconds, self._fraction), file=self._stream)
                self._lines_before = text.count_said_lines()

    def _clear(self) -> None:
        if self._drawn and self._stream is not None:
            text.draw("", self._stream)
            self._drawn = False


def format_log_line(what: str, seconds: float, fraction: str = "") -> str:
    """Return the line of an activity for a log: the first one has no seconds."""
    return f"{what} …" if seconds < LOG_SECONDS else f"{what} … {text.format_duration(seconds)}{fraction}"


class Ticker:
    """Call ``show`` once a second while something takes long, from a thread of its own.

    ``show`` gets the seconds since `begin`, and whether a log should get a line: for the first call, after 30 seconds,
    after a minute, after two, and so on. It is never called if TRAINWRIGHT_QUIET is set.
    """

    def __init__(self, show: Callable[[float, bool], None]) -> None:
        self._show = show
        self._change = threading.Condition()
        self._started_at: float | None = None
        self._due = self._log_due = 0.0  # of the next call, and of the next one for a log; in seconds since `begin`
        self._wakes = math.inf  # when the thread looks again by itself
        self._closed = bool(os.environ.get("TRAINWRIGHT_QUIET"))
        self._thread: threading.Thread | None = None

    def begin(self, quiet_seconds: float | None = None) -> None:
        """Count the seconds from now, and call ``show`` once they are more than ``quiet_seconds``, by default two."""
        if self._closed:
            return
        quiet_seconds = QUIET_SECONDS if quiet_seconds is None else quiet_seconds
        with self._change:
            self._started_at = time.monotonic()
            self._due, self._log_due = quiet_seconds, 0.0
            if self._thread is None:
                # A daemon thread: a process that fails must be able to end.
                self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
                self._thread.start()
            elif self._started_at + quiet_seconds < self._wakes:  # it need not be woken for every step of a fast run
                self._change.notify()

    def stop(self) -> None:
        """Stop until the next `begin`; nothing is shown after this returns."""
        with self._change:
            self._started_at = None

    def close(self) -> None:
        """Stop, and end the thread."""
        with self._change:
            self._closed, self._started_at = True, None
            self._change.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        with self._change:
            while not self._closed:
                if self._started_at is None:
                    self._wakes = math.inf
                    self._change.wait()
                    continue
                seconds = time.monotonic() - self._started_at
                if seconds < self._due:
                    self._wakes = self._started_at + self._due
                    self._change.wait(self._due - seconds)
                    continue
                for_log = seconds >= self._log_due
                if for_log:
                    self._log_due = LOG_SECONDS
                    while self._log_due <= seconds:
                        self._log_due *= 2
                self._due = seconds + _TICK_SECONDS
                self._show(seconds, for_log)
