"""What has to be true of the ledger of any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.engine.event_reader import find_resumed_step, read_log
from trainwright.observe.ledger import RankLedger, read_ledger


def whole_ledger(run: Path, ranks: int) -> list[RankLedger]:
    """The ledger of a run of so many ranks: all of their time is in it, and no more is repeated than was undone."""
    events = read_log(run / "events.jsonl").everything
    undone, ended = 0.0, {0: float(events[0]["time"])}  # when each step ended
    for event in events:
        if event["event"] == "step":
            ended[event["step"]] = event["time"]
        elif event["event"] in ("start", "rewind"):
            step = find_resumed_step(event) or 0
            undone += event["time"] - ended[step]
            ended = {number: time for number, time in ended.items() if number <= step}
    ledger = read_ledger(run, events)
    assert [each.rank for each in ledger] == list(range(ranks))
    for each in ledger:
        assert sum(each.seconds.values()) == pytest.approx(each.wall, rel=0.01)
        assert each.seconds.get("repeated", 0.0) <= undone + 0.01
    return ledger
