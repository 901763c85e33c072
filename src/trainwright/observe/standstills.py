"""Standstills of a rank inside collectives, which delay all ranks and look the same to all of them."""

from __future__ import annotations

import threading
import time
from typing import Self

from trainwright.heartbeat import Heartbeat

_TICK, _LATE = 0.02, 0.015  # seconds


class Standstills:
    """Count the seconds inside collectives in which this process did not run, from a thread that wakes late then.

    A process that is stopped again and again, as by cpulimit, or that gets no processor, is late in the collective that
    it has entered already. There is no other trace of that: all ranks wait until it goes on.
    """

    def __init__(self, own: Heartbeat) -> None:
        self._own = own
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="standstills", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _count(self) -> None:
        before, waited = time.monotonic(), self._own.waited()
        while not self._closed.wait(_TICK):
            now, now_waited = time.monotonic(), self._own.waited()
            if (late := now - before - _TICK) > _LATE:
                self._own.stood_still += min(late, max(0.0, now_waited - waited))
            before, waited = now, now_waited
