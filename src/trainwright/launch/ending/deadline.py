"""When a run has to have stopped: at a time, after a time, when its Slurm job ends, or after a step."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timedelta

from trainwright.errors import RequestError
from trainwright.launch.ending.scheduler_job import scheduler_job
from trainwright.recipe.sections.fields import seconds_of

_END = "SLURM_JOB_END_TIME"
_STEP = re.compile(r"step ([1-9]\d*)")
_SLURM_SECONDS = 10  # for the scheduler's answer
_CLOCK_SECONDS = 5.0  # of two clocks that count as the same
_CLOCK = re.compile(r"^sdiag output at .*\((\d+)\)$", re.MULTILINE)


@dataclass(frozen=True)
class Deadline:
    """A point of time by the monotonic clock, which no change of the system's time moves.

    Attributes:
        seconds: of ``time.monotonic``.
        shown: the time of day, and what it is from.
        step: the last step; None: any.
    """

    seconds: float
    shown: str
    step: int | None = None


def deadline_of(until: str | None, time_limit: str | None, begun: float = 0.0) -> Deadline | None:
    """Return the earliest of ``until``, ``time_limit`` from the begin of the launch, and the end of this Slurm job;
    None without any.

    Args:
        until: a date and time in ISO 8601 (``2026-03-01T06:00``), a time of day (``06:00``): its next occurrence, or a
            step (``step 400``).
        time_limit: such as ``4 h`` or ``90 min``.
        begun: seconds since the launch began, of which this may be a later attempt.

    Raises:
        RequestError: one of them is malformed, or was in the past when the launch began.
    """
    now, monotonic = datetime.now().astimezone(), time.monotonic()
    last = _STEP.fullmatch(until or "")
    step = None if last is None else int(last[1])
    found = earliest(None if last is not None else until, time_limit, now - timedelta(seconds=begun))
    if found is None:
        return None if step is None else Deadline(math.inf, f"the end of step {step} (--until)", step)
    end, source = found
    return Deadline(monotonic + (end - now).total_seconds(), f"{end:%Y-%m-%d %H:%M:%S} ({source})", step)


def earliest(until: str | None, time_limit: str | None, now: datetime) -> tuple[datetime, str] | None:
    """Return the time of `deadline_of`, for a launch that begins ``now``, and what it is from. Raises RequestError."""
    ends: list[tuple[datetime, str]] = []
    if until is not None:
        ends.append((_time_of(until, now), f"--until {until}"))
    if time_limit is not None:
        try:
            ends.append((now + timedelta(seconds=seconds_of(time_limit)), f"--time-limit {time_limit}"))
        except (ValueError, OverflowError):
            raise RequestError(f"--time-limit: expected a time such as 4 h or 90 min, not {time_limit!r}") from None
    if (job := _end_of_job()) is not None:
        ends.append(job)
    return min(ends, default=None)


def _time_of(until: str, now: datetime) -> datetime:
    try:
        found = datetime.fromisoformat(until).astimezone()
    except (ValueError, OverflowError):
        try:
            of_day = datetime.strptime(until, "%H:%M").time()
        except ValueError:
            raise RequestError(
                "--until: expected a date and time such as 2026-03-01T06:00, a time of day such as 06:00, or a step "
                f"such as 'step 400', not {until!r}"
            ) from None
        found = datetime.combine(now.date(), of_day).astimezone()
        if found <= now:
            found = datetime.combine(now.date() + timedelta(days=1), of_day).astimezone()
    if found <= now:
        raise RequestError(f"--until: {until} is in the past; it is {now:%Y-%m-%dT%H:%M} now")
    return found


def _end_of_job() -> tuple[datetime, str] | None:
    """Return when Slurm ends the job of this process, or None if there is no job or no limit."""
    job = scheduler_job() if "SLURM_JOB_ID" in os.environ else None
    if job is None:
        return None
    end = os.environ.get(_END, "")
    if not end.isdigit():
        end = _ask_slurm(job)
    try:
        found = datetime.fromtimestamp(int(end)) if end.isdigit() else datetime.fromisoformat(end)
    except (ValueError, OverflowError, OSError):  # no limit, or no scheduler that could be asked
        return None
    source, ahead = f"the time limit of Slurm job {job}", _ahead_of_slurm()
    if abs(ahead) <= _CLOCK_SECONDS:
        return found.astimezone(), source
    apart = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the scheduler's"
    return found.astimezone() + timedelta(seconds=ahead), f"{source}; this node's clock is {apart}, which counts"


def _ahead_of_slurm() -> float:
    """Return by how many seconds this node's clock is ahead of the scheduler's, which ends the job; 0 if it does not
    say.
    """
    found = _CLOCK.search(_answer("sdiag"))
    return 0.0 if found is None else time.time() - float(found[1])


def _ask_slurm(job: str) -> str:
    """Return the end of the job as squeue shows it; older versions of Slurm do not set it in the environment."""
    lines = _answer("squeue", "--noheader", "--format", "%e", "--jobs", job).split()
    return lines[0] if lines else ""


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
