"""Stop requests other than signals: a file in the run directory, and a deadline.

The deadline is a time, a time span, the end of a Slurm job, or a step.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from trainwright.engine.events import Record
from trainwright.errors import RequestError
from trainwright.run.shutdown.stop import find_scheduler_job

STOP_FILE, CHECKPOINT_FILE = "stop", "checkpoint"
_TAKEN_FILE = "stop.taken"  # what the file becomes, so that the job of the run knows why it has ended
_REASON_FILE = "stop.reason"  # why the run has stopped, a deadline included, for a launcher that starts it again
_LOOK_SECONDS = 0.5
# A step, or a batch of an evaluation, that has begun is finished; then a checkpoint is written, and the processes end.
_STEPS, _EVALUATIONS = 20, 20  # the longest of the last ones counts
_STEP_FACTOR, _WRITE_FACTOR, _END_SECONDS = 1.5, 1.5, 3.0
STATE_BYTES = 12  # of a parameter that is trained, in a checkpoint: the weight and two moments
# Until a checkpoint has been written: what a processor prepares and checks of one, and how much is written to measure
# the disk.
_BYTES_PER_SECOND, _TRIAL_BYTES, _TRIAL_SECONDS = 200e6, 64 * 2**20, 2.0


def ask(file: Path) -> None:
    """Request what a file of a run directory stands for, STOP_FILE or CHECKPOINT_FILE. Raises RequestError."""
    try:
        # In a directory of others it may be a link, or a pipe.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}") from None


def estimate_stop_seconds(step: float, write: float) -> float:
    """Return the seconds from a request to the end of a run, whose step and checkpoint take so long at most.

    Args:
        step: also a batch of an evaluation, or a prompt, after which ranks look for a request.
    """
    return _STEP_FACTOR * step + _WRITE_FACTOR * write + _END_SECONDS


def estimate_write_seconds(state_bytes: int, directory: Path) -> float:
    """Return the seconds of a checkpoint in ``directory`` before one has been written, from how fast the first bytes
    of a file get to the disk there.
    """
    return state_bytes / min(_BYTES_PER_SECOND, _measure_write_speed(directory, min(state_bytes, _TRIAL_BYTES)))


def _measure_write_speed(directory: Path, size: int) -> float:
    """Write up to ``size`` bytes to a file without a name; return bytes a second, infinity if none can be written."""
    piece, byte_count, started_at = os.urandom(2**20), 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            while byte_count < size and time.perf_counter() - started_at < _TRIAL_SECONDS:
                byte_count += file.write(piece)
                os.fsync(file.fileno())
    except OSError:
        return math.inf
    return byte_count / (time.perf_counter() - started_at) if byte_count else math.inf


class StopRequests:
    """Request a stop when the file ``stop`` appears in the run directory, or early enough before a deadline, and a
    checkpoint when the file ``checkpoint`` appears.

    An observer of the run's events, as a deadline has to leave the time that a step and a checkpoint take. One process
    of the run looks; what it requests, all agree on.

    Args:
        state_bytes: size of a checkpoint, for the time before one has been written.
        stop: requests the stop.
        tell: called with the reason.
        warn: called with the seconds that a stop takes, when a first checkpoint has been written; returns a warning if
            they are more than a scheduler gives, or None.
    """

    def __init__(
        self,
        run: Path,
        deadline: Deadline | None,
        state_bytes: int,
        stop: Callable[[], None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[float], str | None] = lambda needed: None,
    ) -> None:
        self._run, self._deadline, self._clock = run, deadline, clock
        self._stop, self._tell = stop, tell
        self._save = False
        self._steps: deque[float] = deque(maxlen=_STEPS)
        # The longest time between two batches or prompts, in each evaluation or generation.
        self._batches: deque[float] = deque(maxlen=_EVALUATIONS)
        self._last_batch, self._first = clock(), True
        self._state_bytes, self._write = state_bytes, state_bytes / _BYTES_PER_SECOND
        self._more = 0.0  # seconds for what is being written or copied when the stop is requested
        self._warn, self._measured = warn, False

    def __call__(self, event: Record) -> None:
        """Take note of how long steps, parts of evaluations, and checkpoints take."""
        if event["event"] == "step":
            self._steps.append(event["step_time"])
        elif event["event"] == "phase":
            self._last_batch, self._first = self._clock(), True
        elif event["event"] == "progress":
            self._measure_batch()
        elif event["event"] == "checkpoint":
            self._write = event["seconds"]
            in_background = event.get("blocked_seconds", self._write) < self._write / 2
            self._more = self._write * in_background + _WRITE_FACTOR * (event.get("copy_seconds") or 0.0)
            if self._steps and not self._measured:
                self._measured = True
                # The scheduler's answer may take long, and nothing is to wait for it.
                threading.Thread(target=self._tell_warning, name="stop-warning", daemon=True).start()

    @property
    def needed(self) -> float:
        """The seconds from a request to the end of the run."""
        return estimate_stop_seconds(max([*self._steps, *self._batches], default=0.0), self._write) + self._more

    def watch(self) -> None:
        """Look for requests in a thread until one is found; tell of the deadline, if there is one."""
        if self._deadline is not None:
            when = "at" if math.isinf(self._deadline.seconds) else "before"
            self._tell(f"the run stops after a checkpoint {when} {self._deadline.shown}")
        threading.Thread(target=self._watch, name="stop-requests", daemon=True).start()

    def take_save(self) -> bool:
        """Return whether the file ``checkpoint`` has appeared since the last call: a checkpoint without a stop."""
        save, self._save = self._save, False
        return save

    def look(self) -> bool:
        """Look once; return whether a stop is requested."""
        if CHECKPOINT_FILE in _list_names(self._run):
            with suppress(OSError):
                (self._run / CHECKPOINT_FILE).unlink()
            self._save = True
        reason = find_stop_reason(self._run, self._deadline, self.needed, self._clock())
        if reason is not None:
            self._tell(f"stopping: {reason}; each worker finishes its step and a checkpoint is written")
            with suppress(OSError):
                (self._run / _REASON_FILE).write_text(reason, encoding="utf-8")
            self._stop()
        return reason is not None

    def _measure_batch(self) -> None:
        now = self._clock()
        if self._first:
            self._batches.append(0.0)
        self._batches[-1] = max(self._batches[-1], now - self._last_batch)
        self._last_batch, self._first = now, False

    def _tell_warning(self) -> None:
        if (warning := self._warn(self.needed)) is not None:
            self._tell(f"warning: {warning}")

    def _watch(self) -> None:
        if self._deadline is not None:
            assumed_seconds, on_disk = self._write, estimate_write_seconds(self._state_bytes, self._run)
            if self._write == assumed_seconds:  # no checkpoint meanwhile
                self._write = on_disk
        while not self.look():
            time.sleep(_LOOK_SECONDS)


def find_stop_reason(run: Path, deadline: Deadline | None, needed: float, now: float) -> str | None:
    """Return why a run that needs ``needed`` seconds to stop is to stop ``now``; None if it is not."""
    if take_stop_file(run):
        return f"asked by {run / STOP_FILE}"
    if deadline is not None and deadline.seconds - now <= needed:
        return f"the run has to end by {deadline.shown}"
    return None


def find_stop_before_steps(run: Path, deadline: Deadline | None) -> str | None:
    """Return why a run of which no process trains now is to stop; None if it is not."""
    return find_stop_reason(run, deadline, _END_SECONDS, time.monotonic())


def take_stop_file(run: Path) -> bool:
    """Rename the run's file ``stop``; return whether there was one."""
    exists = STOP_FILE in _list_names(run)
    if exists:
        with suppress(OSError):
            (run / STOP_FILE).replace(run / _TAKEN_FILE)
    return exists


def _list_names(run: Path) -> list[str]:
    """Return a directory's names; asked for by name, a shared file system may remember that a file is not there."""
    try:
        return os.listdir(run)
    except OSError:
        return []


def stop_was_requested(run: Path, within: float = math.inf) -> bool:
    """Return whether the file ``stop`` has ended the last launch of a run, or has appeared since.

    Args:
        within: only if it appeared in the last seconds, such as since a process began.
    """
    for name in {STOP_FILE, _TAKEN_FILE}.intersection(_list_names(run)):
        with suppress(OSError):
            if within == math.inf or _compute_age(run / name) < within:
                return True
    return False


def forget_stops(run: Path, seconds_before: float) -> bool:
    """Remove what asked earlier launches to stop or to write a checkpoint.

    Args:
        seconds_before: seconds since this launch began; what has been asked since is kept.

    Returns:
        Whether another launch, which this one has waited for, was asked to stop since.
    """
    for name in (STOP_FILE, _TAKEN_FILE, _REASON_FILE, CHECKPOINT_FILE):
        with suppress(OSError):
            if _compute_age(run / name) >= seconds_before:
                (run / name).unlink()
    return _TAKEN_FILE in _list_names(run)


def find_last_stop_reason(run: Path) -> str | None:
    """Return why the last launch of a run has stopped, by the file ``stop`` or a deadline; None if it has not."""
    try:
        return (run / _REASON_FILE).read_text(encoding="utf-8")
    except OSError:
        return None


def _compute_age(path: Path) -> float:
    """Return the seconds since a file was changed, by the clock of its file system, which may be another machine's."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.stat(now.fileno()).st_mtime - path.stat().st_mtime


_UNTIL_STEP = re.compile(r"step ([1-9]\d*)")
_SLURM_SECONDS = 10  # for the scheduler's answer
_CLOCK_SECONDS = 5.0  # of two clocks that count as the same
_SLURM_CLOCK = re.compile(r"^sdiag output at .*\((\d+)\)$", re.MULTILINE)


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


def choose_deadline(until: str | None, time_limit: str | None, seconds_before: float = 0.0) -> Deadline | None:
    """Return the earliest of ``until``, ``time_limit`` from the begin of the launch, and the end of this Slurm job;
    None without any.

    Args:
        until: a date and time in ISO 8601 (``2026-03-01T06:00``), a time of day (``06:00``): its next occurrence, or a
            step (``step 400``).
        time_limit: such as ``4 h`` or ``90 min``.
        seconds_before: seconds since the launch began, of which this may be a later attempt.

    Raises:
        RequestError: one of them is malformed, or was in the past when the launch began.
    """
    now, monotonic = datetime.now().astimezone(), time.monotonic()
    last = _UNTIL_STEP.fullmatch(until or "")
    step = None if last is None else int(last[1])
    deadline = choose_earliest(None if last is not None else until, time_limit, now - timedelta(seconds=seconds_before))
    if deadline is None:
        return None if step is None else Deadline(math.inf, f"the end of step {step} (--until)", step)
    end, source = deadline
    return Deadline(monotonic + (end - now).total_seconds(), f"{end:%Y-%m-%d %H:%M:%S} ({source})", step)


def choose_earliest(until: str | None, time_limit: str | None, now: datetime) -> tuple[datetime, str] | None:
    """Return the time of `choose_deadline`, for a launch that begins ``now``, and its source. Raises RequestError."""
    ends: list[tuple[datetime, str]] = []
    if until is not None:
        ends.append((_parse_time(until, now), f"--until {until}"))
    if time_limit is not None:
        from trainwright.recipe.sections.fields import parse_seconds  # imports pydantic

        try:
            ends.append((now + timedelta(seconds=parse_seconds(time_limit)), f"--time-limit {time_limit}"))
        except (ValueError, OverflowError):
            raise RequestError(f"--time-limit: expected a time such as 4 h or 90 min, not {time_limit!r}") from None
    if (job := _end_of_job()) is not None:
        ends.append(job)
    return min(ends, default=None)


def _parse_time(until: str, now: datetime) -> datetime:
    try:
        deadline = datetime.fromisoformat(until).astimezone()
    except (ValueError, OverflowError):
        try:
            of_day = datetime.strptime(until, "%H:%M").time()
        except ValueError:
            raise RequestError(
                "--until: expected a date and time such as 2026-03-01T06:00, a time of day such as 06:00, or a step "
                f"such as 'step 400', not {until!r}"
            ) from None
        deadline = datetime.combine(now.date(), of_day).astimezone()
        if deadline <= now:
            deadline = datetime.combine(now.date() + timedelta(days=1), of_day).astimezone()
    if deadline <= now:
        raise RequestError(f"--until: {until} is in the past; it is {now:%Y-%m-%dT%H:%M} now")
    return deadline


def _end_of_job() -> tuple[datetime, str] | None:
    """Return when Slurm ends the job of this process, or None if there is no job or no limit."""
    job = find_scheduler_job() if "SLURM_JOB_ID" in os.environ else None
    if job is None:
        return None
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():  # older versions of Slurm do not set it
        lines = _run_command("squeue", "--noheader", "--format", "%e", "--jobs", job).split()
        end = lines[0] if lines else ""
    try:
        job_end = datetime.fromtimestamp(int(end)) if end.isdigit() else datetime.fromisoformat(end)
    except (ValueError, OverflowError, OSError):  # no limit, or no scheduler that could be asked
        return None
    source = f"the time limit of Slurm job {job}"
    match = _SLURM_CLOCK.search(_run_command("sdiag"))
    ahead = 0.0 if match is None else time.time() - float(match[1])  # of the scheduler, which ends the job
    if abs(ahead) <= _CLOCK_SECONDS:
        return job_end.astimezone(), source
    apart = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the scheduler's"
    return job_end.astimezone() + timedelta(seconds=ahead), f"{source}; this node's clock is {apart}, which counts"


def _run_command(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
