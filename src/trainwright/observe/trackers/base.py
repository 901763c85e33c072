"""What all trackers share: a thread, a bounded queue, and the figures of an event."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trainwright.engine.event_reader import EventRecord, resumed_step
from trainwright.run.observers.tensorboard import Values, values_of
from trainwright.run.process import console
from trainwright.utils.text import say

_EVENTS = 10_000  # those that wait for a slow tracker; about an hour of steps
_LAST_SECONDS = 30.0


class Tracker(Protocol):
    """A tracker of experiments; called in one thread. One with a method ``span`` also gets ``evaluate`` and
    ``checkpoint`` events, to record how long they took.
    """

    def begin(self, run: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Begin a run, or continue one. ``config``: the recipe as plain values."""

    def log(self, step: int, values: Values) -> None:
        """Record values of a step."""

    def end(self, status: str) -> None:
        """End the run: ``finished`` or ``stopped``."""


class TrackerObserver:
    """Pass a run's figures to a tracker in a thread, so that no step waits for it.

    A tracker that fails, or does not answer, is given up with one message: the run goes on, and its events are in
    ``events.jsonl``. What a killed run repeats is recorded again, with the same steps.

    Args:
        name: for messages.
        make: makes the tracker, in the thread; importing its library may take seconds.
    """

    def __init__(self, name: str, run: Path, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._run = run
        self._make = make
        self._events: queue.Queue[EventRecord] = queue.Queue(_EVENTS)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def __call__(self, event: EventRecord) -> None:
        """Pass an event on; at the end of the run, wait until it has arrived, half a minute at most."""
        if event["event"] not in ("start", "step", "evaluate", "checkpoint", "finish"):
            return
        if self._thread is None:
            # A daemon: a run that fails must not wait for a tracker.
            self._thread = threading.Thread(target=self._pass_on, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                self._say(f"does not keep up; it misses events, which are in {self._run / 'events.jsonl'}")
        if event["event"] == "finish":
            self._thread.join(_LAST_SECONDS)
            if self._thread.is_alive():
                self._say(f"has not taken the last events within {_LAST_SECONDS:.0f} s; the run ends without it")

    def _pass_on(self) -> None:
        try:
            tracker = self._make()
            span = getattr(tracker, "span", None)
            while True:
                event = self._events.get()
                if event["event"] == "start":
                    tracker.begin(self._run, _config(self._run), resumed_step(event) is not None)
                elif event["event"] == "finish":
                    tracker.end(str(event["status"]))
                    return
                else:
                    if values := values_of(event):
                        tracker.log(int(event["step"]), values)
                    if span is not None and event["event"] in ("evaluate", "checkpoint"):
                        span(event)
        except Exception as error:
            reason = str(error).strip().splitlines()
            self._say(f"failed ({type(error).__name__}: {reason[0] if reason else 'no reason given'}); the run goes on")

    def _say(self, what: str) -> None:
        print_notice_of(self._name, what)


def print_notice_of(tracker: str, what: str) -> None:
    """Tell the user what is wrong with a tracker: on the console, or in the worker's log."""
    say(f"warning: logging.observers: {tracker} {what}", file=console())


def _config(run: Path) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
