"""Record that a run has failed, once nothing restarts it: in its events, and on the page that it writes by itself."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from trainwright.engine.event_reader import read_log
from trainwright.engine.events import Fault, append_event
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.run.observers.hooks import after_failure

_RANK = re.compile(r"^rank (\d+)\b")


def record_failure(run: Path, message: str | None, *, waits: bool = True) -> None:
    """Record the failure that ended a run which had begun, and write its page again.

    Args:
        message: why it failed; None if it was killed on request.
        waits: for the page to be written, which a process that is about to be killed cannot.
    """
    history = read_log(run / "events.jsonl").everything
    events = [event for event in history if event["event"] != "notice"]
    started = next((event for event in reversed(events) if event["event"] == "start"), None)
    if started is None or events[-1]["event"] == "finish":
        return
    faults = [event for event in events[events.index(started) :] if event["event"] == "fault"]
    is_recorded = events[-1]["event"] == "fault" or any(fault["detail"] in (message or "") for fault in faults)
    if message is not None and not is_recorded:
        line = message.splitlines()[0] if message else "failed without a message"
        rank = _RANK.match(line)
        fault = Fault(kind="failure", rank=int(rank[1]) if rank else 0, detail=line, action="the run ends")
        with suppress(OSError):
            append_event(run / "events.jsonl", fault)
    with suppress(OSError, RequestError):
        settings = load_recipe(run / "recipe.yaml").logging.observers
        after_failure(run, settings, time.time() - started["time"], waits=waits)
