"""Whether the clocks of the nodes agree, from the times in their messages."""

from __future__ import annotations

import sys
import time

from trainwright.text import say

_LIMIT = 10.0
# A message arrives late, never early: the least delay of a few shows how far a clock is off.
_ENOUGH = 3


class Clocks:
    """Warn once of each node whose clock differs from this one's by more than 10 s."""

    def __init__(self) -> None:
        self._ahead: dict[str, list[float]] = {}  # by node: seconds by which its messages seem to come from the future

    def hear(self, node: str, here: str, sent: float) -> None:
        """Take the time at which ``node`` says that it has sent a message, which is read now on ``here``."""
        found = self._ahead.setdefault(node, [])
        if len(found) == _ENOUGH:
            return
        found.append(sent - time.time())
        apart = max(found)
        if len(found) == _ENOUGH and abs(apart) > _LIMIT:
            side = "ahead of" if apart > 0 else "behind"
            say(
                f"warning: the clock of {node} is {abs(apart):.0f} s {side} that of {here}: times in their logs and in "
                "the ledger do not match; synchronize them (chronyd)",
                file=sys.stderr,
            )
