"""The messages between the nodes of a run, and how long a node has sent none.

The kernel of a machine that fails may still answer for its programs, so each launcher says now and then that it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from trainwright.run.group.peers import GONE, Message

STOP, KILLED, FAILED, FINISHED, RUNS = "stop", "killed", "failed", "finished", "runs"
# The messages between launches: a node waits for one, node 0 begins or refuses one, or the run is over.
READY, LAUNCH, REFUSED, OVER, DROPPED = "ready", "launch", "refused", "over", "dropped"
# The fields of each kind of message that have to be there, with their types.
_FIELDS: dict[str, dict[str, type]] = {
    GONE: {},
    STOP: {},
    KILLED: {},
    DROPPED: {},
    FAILED: {"number": int, "code": int},
    FINISHED: {"number": int, "codes": dict},
    RUNS: {},
    READY: {"room": int, "host": str, "gpus": int, "version": str},
    LAUNCH: {"number": int, "nodes": list, "each": int, "port": int},
    REFUSED: {"node": int, "code": int, "text": str},
    OVER: {"code": int, "text": str},
}
_MORE_FIELDS: dict[str, type] = {"text": str, "codes": dict, "records": dict, "memory": bool, "room": int}
_OF_NODE_0 = (LAUNCH, REFUSED, OVER, DROPPED)
_DIGITS = 8  # of a rank


def is_valid(message: Message) -> bool:
    """Return whether a node may send this message, and whether it has the fields of its kind, with their types."""
    kind = message["kind"]
    if kind not in _FIELDS or (kind in _OF_NODE_0 and message["peer"] != 0):
        return False
    if any(type(message.get(name)) is not of for name, of in _FIELDS[kind].items()):
        return False
    if any(name in message and type(message[name]) is not of for name, of in _MORE_FIELDS.items()):
        return False
    ranks = [*message.get("codes", {}), *message.get("records", {})]
    return (
        all(rank.isascii() and rank.isdigit() and len(rank) < _DIGITS for rank in ranks)
        and all(code is None or type(code) is int for code in message.get("codes", {}).values())
        and all(isinstance(record, dict) for record in message.get("records", {}).values())
        and all(type(node) is int for node in message.get("nodes", ()))
        and 0 <= message.get("port", 0) < 2**16
    )


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
