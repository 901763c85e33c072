"""Tell who is waited for while processes of a run meet, so that a missing one is noticed before the time is over."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from trainwright.utils.text import say

_FIRST_SECONDS = 10.0


class Waiting:
    """Call ``tell`` repeatedly: it writes a line after 10 s, and then after twice as long each time.

    Args:
        who: this process, such as "rank 1".
        seconds: how long it waits at most; None: without limit.
    """

    def __init__(self, who: str, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._who, self._seconds, self._clock = who, seconds, clock
        self._started_at = clock()
        self._next = _FIRST_SECONDS

    def tell(self, what: Callable[[], str]) -> None:
        """Write that ``what`` is waited for, if it is time to."""
        passed = self._clock() - self._started_at
        if passed < self._next:
            return
        self._next += 2 * passed
        until = "" if self._seconds is None else f"; --rendezvous-timeout ends this after {self._seconds:g} s"
        say(f"{self._who} has been waiting for {what()} for {passed:.0f} s{until}", file=sys.stderr)
