"""The run's exit code, for a launcher that ends with a code of its own, and the time that it leaves a run to stop."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainwright.errors import EXIT_FAULT, EXIT_FINISHED, EXIT_STOPPED, Stopped
from trainwright.machine.usage import compute_process_age
from trainwright.run.shutdown.requests import Deadline, find_last_stop_reason, find_stop_before_steps, forget_stops
from trainwright.utils.text import quote_word

CODES_FILE = "TRAINWRIGHT_EXIT_CODES"

_BEGUN, _OUTWEIGHS = "begun", "!"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # torchrun's and accelerate's number of the attempt, from 0
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # their seconds from a signal until they kill the processes


def record_start() -> None:
    """Tell the command that runs this process's launcher, if there is one, that this process runs."""
    _record(_BEGUN)


def record_exit_code(code: int, *, outweighs: bool = False) -> int:
    """Tell the command that runs this process's launcher, if there is one, with which code the run ends; return it.

    Args:
        outweighs: it is known why the run ends, where others may only see that a connection broke.
    """
    if code != EXIT_FINISHED:
        _record(f"{code}{_OUTWEIGHS if outweighs else ''}")
    return code


def read_exit_code(file: Path, launcher: int) -> int:
    """Return the exit code of the run whose launcher has ended with the code ``launcher``, or else that code.

    Only the last of the attempts of a launcher that starts the processes again decides.

    Args:
        file: what the processes have recorded.
    """
    if launcher == EXIT_FINISHED or not file.exists():
        return launcher
    lines = [words for line in file.read_text(encoding="ascii").splitlines() if len(words := line.split()) == 2]
    last = max((int(attempt) for attempt, _ in lines), default=0)
    codes = [word for attempt, word in lines if int(attempt) == last]
    recorded_codes = [int(word.removesuffix(_OUTWEIGHS)) for word in codes if word != _BEGUN]
    if codes and not recorded_codes:  # nothing that a process does itself ends it without a word
        return EXIT_FAULT
    # Of a failure, processes that are stopped because of it may report the stop.
    failures = [code for code in recorded_codes if code != EXIT_STOPPED]
    final_codes = [int(word.removesuffix(_OUTWEIGHS)) for word in codes if word.endswith(_OUTWEIGHS)]
    return [launcher, *recorded_codes, *failures, *final_codes][-1]


def _record(word: str) -> None:
    if (file := os.environ.get(CODES_FILE)) is not None:
        with suppress(OSError), open(file, "a", encoding="ascii") as out:
            out.write(f"{os.environ.get(ATTEMPT, '0')} {word}\n")


def compute_launch_age(launcher: int | None, number: int) -> float:
    """Return the seconds since the launch of a run began.

    Args:
        launcher: pid of the launcher; None: this process's parent.
        number: of earlier runs that the same processes trained in sequence.
    """
    if ATTEMPT in os.environ and (not number or _is_repeated()):
        return compute_process_age(launcher or os.getppid())
    return 0.0 if number else compute_process_age()


def refuse_stopped(run: Path, seconds_before: float, deadline: Deadline | None, *, resumed: bool) -> None:
    """Raise Stopped if a stop was requested since the launch began, ``seconds_before`` ago, or its time is over."""
    was_asked = forget_stops(run, seconds_before)
    reason = find_last_stop_reason(run) if _is_repeated() else None
    if reason is None:
        reason = "it was asked to stop since this launch began" if was_asked else find_stop_before_steps(run, deadline)
    if reason is not None:
        how = f"continue with --resume {quote_word(run)}" if resumed else "run the same command again"
        raise Stopped(f"stopped before the next step: {reason}; {how}")


def _is_repeated() -> bool:
    return os.environ.get(ATTEMPT, "0") != "0"


_SHUTDOWN_SECONDS = "30"  # torch/distributed/launcher/api.py, LaunchConfig


def check_torchrun_time(needed: float, launcher: str) -> str | None:
    """Return a warning if ``launcher`` is torchrun, or starts it, and gives its processes less time than a stop needs;
    otherwise None.

    Args:
        needed: the seconds from a signal to the end of the run, with a step and a checkpoint.
    """
    limit = os.environ.get(SHUTDOWN_TIMEOUT, _SHUTDOWN_SECONDS)
    if launcher not in ("torchrun", "accelerate launch") or not limit.isdigit() or needed <= int(limit):
        return None
    return (
        f"a stop takes about {needed:.0f} s (step, checkpoint, end), and {launcher} kills the processes {limit} s "
        "after a signal, before the last checkpoint is written; start it with trainwright under, or set "
        f"{SHUTDOWN_TIMEOUT} to more seconds"
    )
