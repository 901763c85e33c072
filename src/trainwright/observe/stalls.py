"""Stalls of a rank inside collectives: they delay all ranks, and look the same on all of them."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from trainwright.run.observers.hooks import ObservedRank
from trainwright.utils.heartbeat import Heartbeat

_TICK, _LATE = 0.02, 0.015  # seconds


def of_rank(rank: ObservedRank) -> AbstractContextManager[object]:
    """Return a context that counts a rank's stalls; a rank that is alone waits for no other."""
    return nullcontext() if rank.info.size == 1 else Stalls(rank.heartbeat)


class Stalls:
    """Count the seconds inside collectives in which this process did not run, with a thread that then wakes up late.

    A process that cpulimit stops, or that gets no processor, may stall in a collective that it has already entered. All
    ranks then wait in the collective, so their seconds do not show which rank stalled.
    """

    def __init__(self, own: Heartbeat) -> None:
        self._own = own
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="stalls", daemon=True)
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
                self._own.stalled += min(late, max(0.0, now_waited - waited))
            before, waited = now, now_waited
