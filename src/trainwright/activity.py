"""Show what a command is doing while there is no other output, once it takes long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from trainwright import text

# Shorter activities are not shown.
_QUIET_SECONDS = 2.0
_TICK_SECONDS = 1.0

_current: Activity | None = None


def doing(what: str) -> None:
    """Report that ``what`` begins, or with "" that it is done; shown by the current `Activity`."""
    if _current is not None:
        _current.begin(what)


class Activity:
    """Show the activities that `doing` reports on ``stream``: with the seconds on a terminal, otherwise as a line.

    A context manager. Activities under two seconds are not shown, and without a ``stream`` none are. It uses a thread,
    so do not fork processes meanwhile that write to the same stream.
    """

    def __init__(self, stream: TextIO | None, what: str = "", quiet_seconds: float = _QUIET_SECONDS) -> None:
        self._stream = stream
        self._what = what
        self._quiet_seconds = quiet_seconds
        self._terminal = stream is not None and text.is_terminal(stream)
        self._ticker: Ticker | None = None
        self._drawn = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        global _current
        self._before, _current = _current, self
        if self._what:
            self.begin(self._what)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._before
        self._end()

    def begin(self, what: str) -> None:
        """Show ``what`` from now on, and nothing for ""."""
        self._end()
        if self._stream is not None and what:
            self._what = what
            self._ticker = Ticker(self._show, self._quiet_seconds)

    def say(self, line: str) -> None:
        """Print a line without disturbing the display."""
        with self._lock:
            text.say(line, file=self._stream)

    def _end(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        self._clear()

    def _show(self, seconds: float, first: bool) -> None:
        assert self._stream is not None
        with self._lock:
            if self._terminal:
                text.draw(f"{self._what} … {text.duration(seconds)}", self._stream)
                self._drawn = True
            elif first:
                text.say(f"{self._what} …", file=self._stream)

    def _clear(self) -> None:
        if self._drawn and self._stream is not None:
            text.draw("", self._stream)
            self._drawn = False


class Ticker:
    """Call ``show`` once a second with the elapsed seconds, and whether it is the first call, until stopped.

    Never in the first ``quiet_seconds``, nor if TRAINWRIGHT_QUIET is set.
    """

    def __init__(self, show: Callable[[float, bool], None], quiet_seconds: float = _QUIET_SECONDS) -> None:
        self._show = show
        self._quiet_seconds = quiet_seconds
        self._stopped = threading.Event()
        # A daemon thread: a process that fails must be able to end.
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; nothing is shown after this returns."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        begun = time.monotonic()
        if os.environ.get("TRAINWRIGHT_QUIET"):
            return
        if self._stopped.wait(self._quiet_seconds):
            return
        self._show(time.monotonic() - begun, True)
        while not self._stopped.wait(_TICK_SECONDS):
            self._show(time.monotonic() - begun, False)
