"""The seconds of every rank of a run by what they were used for, from its ledger, for the live page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.observe.ledger import CATEGORIES, read_ledger
from trainwright.observe.reader import EventRecord, read_log

_RANKS = 256  # of more, the first ones
# A ledger is read again after this time, or this many times what reading it takes.
_LEAST_SECONDS, _TIMES = 5.0, 20.0


class Seconds:
    """The ledgers of runs, which are read at most every few seconds."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[float, dict[str, Any]]] = {}  # until when, and what

    def of(self, run: Path, events: Sequence[EventRecord]) -> dict[str, Any]:
        """Return ``categories`` in their order, and for each of ``ranks`` its number, ``trained`` and ``seconds`` by
        category.

        Args:
            events: those of the run that count.
        """
        until, found = self._known.get(run, (0.0, {}))
        begun = time.monotonic()
        if begun >= until:
            found = _read(run, events)
            now = time.monotonic()
            self._known[run] = now + max(_LEAST_SECONDS, _TIMES * (now - begun)), found
        return found


def _read(run: Path, events: Sequence[EventRecord]) -> dict[str, Any]:
    # Only a run that went back has repeated anything; which steps, all its events say.
    went_back = sum(event["event"] in ("start", "rewind") for event in events) > 1
    ledger = read_ledger(run, read_log(run / "events.jsonl").everything if went_back else ())[:_RANKS]
    return {
        "categories": [name for name in CATEGORIES if any(name in rank.seconds for rank in ledger)],
        "ranks": [{"rank": each.rank, "trained": each.trained, "seconds": dict(each.seconds)} for each in ledger],
    }
