"""The number of finished rows: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from trainwright.utils import text
from trainwright.utils.text import say

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 5.0


class Counting:
    """Count up to ``total`` under ``label`` on ``stream``; nothing is shown before the first one is done.

    Args:
        unit: what is counted.
    """

    def __init__(self, stream: TextIO, label: str, total: int, unit: str = "rows") -> None:
        self._unit = unit
        self._stream = stream
        self._label = label
        self._total = total
        self._done = 0
        self._started_at = time.monotonic()
        self._shown = float("-inf")

    def __call__(self, count: int) -> None:
        """Add ``count``."""
        if not self._done:
            self._started_at = time.monotonic()
        self._done = min(self._total, self._done + count)
        now, terminal = time.monotonic(), text.is_terminal(self._stream)
        finished = self._done == self._total
        if not finished and now - self._shown < (_REDRAW_SECONDS if terminal else _LINE_SECONDS):
            return
        self._shown = now
        counted = f": {self._done:,}/{self._total:,} {self._unit}"
        if not terminal:
            say(f"{self._label}{counted}", file=self._stream)
            return
        remaining = (now - self._started_at) / self._done * (self._total - self._done)
        shown, ending = ("", "") if finished else (self._label, f"{counted}  {text.duration(remaining)} left")
        text.draw(shown, self._stream, ending)
