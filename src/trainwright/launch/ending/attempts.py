"""Attempts of torchrun at a run, which starts the processes again also after a stop: all of them are one launch."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.errors import Stopped
from trainwright.launch.ending.deadline import Deadline
from trainwright.launch.ending.exit_code import ATTEMPT
from trainwright.launch.ending.requests import forget_stops, look_before_steps, reason_of_last_stop
from trainwright.machine.usage.sample import process_age
from trainwright.text import quoted


def seconds_since_launch(launcher: int | None, number: int) -> float:
    """Return the seconds since the launch of a run began.

    Args:
        launcher: pid of the launcher; None: this process's parent.
        number: of earlier runs that the same processes trained in sequence.
    """
    if ATTEMPT in os.environ and (not number or _is_repeated()):
        return process_age(launcher or os.getppid())
    return 0.0 if number else process_age()


def refuse_stopped(run: Path, begun: float, deadline: Deadline | None, *, resumed: bool) -> None:
    """Raise Stopped if the run was asked to stop since the launch began, so many seconds ago, or its time is over."""
    asked = forget_stops(run, begun)
    reason = reason_of_last_stop(run) if _is_repeated() else None
    if reason is None:
        reason = "it was asked to stop since this launch began" if asked else look_before_steps(run, deadline)
    if reason is not None:
        how = f"continue with --resume {quoted(run)}" if resumed else "run the same command again"
        raise Stopped(f"stopped before the next step: {reason}; {how}")


def _is_repeated() -> bool:
    return os.environ.get(ATTEMPT, "0") != "0"
