"""How long the other nodes of a run have sent no message.

The kernel of a machine that fails may still answer for its programs, so each launcher says now and then that it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

SILENCE_LIMIT = 30.0
_RUNS_SECONDS = 2.0
# A longer gap between two calls is time in which this process did not run, and has not heard of anybody.
_MAX_LOOK_GAP = 5.0


class Silence:
    """Count how long the other nodes have been silent; call `silent` repeatedly."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[int, float] = {}
        self._looked = self._said = clock()

    def hear(self, node: int) -> None:
        """Note a message of a node."""
        self._heard[node] = self._clock()

    def is_time(self) -> bool:
        """Return whether this node is to say that it runs."""
        now = self._clock()
        if now - self._said < _RUNS_SECONDS:
            return False
        self._said = now
        return True

    def silent(self, nodes: Iterable[int]) -> list[int]:
        """Return which of these nodes have been silent for `SILENCE_LIMIT` seconds in which this process ran."""
        now, watched = self._clock(), list(nodes)
        if now - self._looked > _MAX_LOOK_GAP:
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        return [node for node in watched if now - self._heard.setdefault(node, now) > SILENCE_LIMIT]
