"""Decide whether a run that failed is restarted from its newest checkpoint, without its user."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainwright.engine.events import Restart
from trainwright.errors import EXIT_TRAINING
from trainwright.launch.ending.failure import FROM_OUTSIDE, Cause, Failure
from trainwright.observe.reader import read_events
from trainwright.paths import write_file
from trainwright.recipe.sections.fields import rate_of

# Beside the logs of the launches that it is about: the times of the restarts so far, the step and the error of each
# failure from within, and after which step the last restarts happened, with their number.
_FILE = Path("logs") / "restarts.json"
_MOST_STUCK = 3  # restarts in a row that got no step further
# The lines of calls in a message of `hangs.judge.Conflict`; numbers and ranks are not the same in every launch.
_DIFFERENT_CALLS = re.compile(
    r"the ranks have entered different collectives: .* at (\S+), and rank \d+ .* at ([^\s;]+)"
)
_RANK = re.compile(r"^rank \d+ ")  # that failed


class Restarts:
    """Count the restarts of a run, and compare each failure with the ones before it.

    Both are kept in the run's directory, as the launcher may be killed together with its workers and started again. On
    several hosts, both the launcher on the first host and the command that has started it decide about the same run.

    Args:
        allowed: ``faults.restarts``.
        clock: returns seconds since the epoch, as the run's events have them.
        begun: when the launch began that may fail, by this clock. Default: now.
    """

    def __init__(
        self, run: Path, allowed: str, clock: Callable[[], float] = time.time, begun: float | None = None
    ) -> None:
        self._run, self._allowed, self._clock = run, allowed, clock
        self._rate = rate_of(allowed)
        self._times: list[float] = []
        self._failures: list[tuple[int | None, str]] = []
        self._stuck: tuple[int | None, int] = (None, 0)
        self._is_written = True
        self._begun = clock() if begun is None else begun

    def decide(self, failure: Failure) -> Restart | Failure:
        """Return the event of a restart, or the failure that the run ends with, which says why there is none.

        An exception before the first step of a launch, and any failure from within that has happened at this step
        before, would happen again. So may one from outside after which several restarts got no step further.
        """
        if failure.cause is None or self._rate.times == 0:
            return failure
        self._read()
        now, step = self._clock(), self._last_step()
        if failure.cause not in FROM_OUTSIDE:
            if failure.cause is Cause.ERROR and step is None:
                return failure
            key = step, _essence(failure.message)
            if key in self._failures:
                why = f"\nnot restarted again: the same error happened twice after {_at(step)}"
                return replace(failure, message=failure.message + why, exit_code=EXIT_TRAINING)
            self._failures.append(key)
        stuck = self._stuck[1] if self._stuck[0] == step else 0
        if stuck >= _MOST_STUCK:
            why = f"\nnot restarted again: {stuck} restarts in a row got no further than {_at(step)}"
            return replace(failure, message=failure.message + why)
        recent = [each for each in self._times if now - each < self._rate.seconds]
        if len(recent) >= self._rate.times:
            why = f"\nnot restarted again: faults.restarts allows {self._allowed}"
            return replace(failure, message=failure.message + why)
        self._times.append(now)
        self._stuck = step, stuck + 1
        self._begun = now
        self._write()
        return Restart(
            cause=str(failure.cause),
            detail=failure.message.splitlines()[0],
            number=len(self._times),
            allowed=self._allowed,
            after_step=step,
        )

    def _read(self) -> None:
        """Take what was decided last, here or by another; without the file, or if it is older, go on with our own."""
        if not self._is_written:
            return
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            kept = json.loads((self._run / _FILE).read_text(encoding="utf-8"))
            times = [float(each) for each in kept["times"]]
            failures = [(step, str(error)) for step, error in kept["failures"]]
            step, count = kept.get("stuck", (None, 0))
            self._times, self._failures, self._stuck = times, failures, (step, int(count))

    def _write(self) -> None:
        file, kept = self._run / _FILE, {"times": self._times, "failures": self._failures, "stuck": self._stuck}
        self._is_written = False
        with suppress(OSError):  # a full disk does not end a run that can go on
            file.parent.mkdir(exist_ok=True)
            write_file(file, json.dumps(kept))
            self._is_written = True

    def _last_step(self) -> int | None:
        """Return the last step that this launch has recorded."""
        try:
            events = read_events(self._run / "events.jsonl")
        except OSError:
            return None
        steps = [event["step"] for event in events if event["event"] == "step" and event["time"] >= self._begun]
        return steps[-1] if steps else None


def _essence(message: str) -> str:
    """Return the part of a failure's message that is the same on every rank and in every launch."""
    different = _DIFFERENT_CALLS.search(message)
    if different is not None:
        return "different collectives at " + " and ".join(sorted(different.groups()))
    lines = [line for line in message.splitlines() if line and not line[0].isspace() and "log: " not in line]
    return _RANK.sub("", lines[-1]).partition(" at 0x")[0] if lines else ""


def _at(step: int | None) -> str:
    return "the start" if step is None else f"step {step}"
