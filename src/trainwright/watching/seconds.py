"""What the ledger of a run says, for the live page: the seconds of every rank, and what its machine does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.machine.usage.sample import figures_of
from trainwright.observe.ledger import CATEGORIES, read_ledger
from trainwright.observe.reader import EventRecord, read_log
from trainwright.reports.seconds import machine_curves

_RANKS = 256  # of more, the first ones
_POINTS = 120  # of a curve
# A ledger is read again after this time, or this many times what reading it takes.
_LEAST_SECONDS, _TIMES = 5.0, 20.0


class Seconds:
    """The ledgers of runs, which are read at most every few seconds."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[float, dict[str, Any]]] = {}  # until when, and what

    def of(self, run: Path, events: Sequence[EventRecord]) -> dict[str, Any]:
        """Return ``categories`` in their order, and for each of ``ranks`` its number, ``trained``, ``seconds`` by
        category and ``now``, what it does in few words by name; and ``machine``, its curves over the seconds since the
        run began.

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
        "ranks": [
            {
                "rank": each.rank,
                "trained": each.trained,
                "seconds": dict(each.seconds),
                "now": figures_of([each.lines[-1].system]),
            }
            for each in ledger
        ],
        "machine": [
            {
                "title": f"{curves.title} ({curves.unit})",
                "notable": curves.is_notable,
                "ranks": {rank: list(zip(*points, strict=True)) for rank, points in curves.points.items() if points},
            }
            for curves in machine_curves(ledger, _POINTS)
        ],
    }
