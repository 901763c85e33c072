"""Whether a run that has ended is worth another start, and how often it has had one without getting further."""

from __future__ import annotations

import json
from pathlib import Path

from trainwright.engine.checkpoints.manifest import checkpoints_in
from trainwright.errors import EXIT_FAULT, EXIT_STOPPED, RequestError
from trainwright.paths import write_file

MOST_FAILURES = 3  # in a row, without a new checkpoint
_SIGNAL = 128  # a shell's code of a process that a signal ended is this and its number


def may_continue(code: int) -> bool:
    """Return whether a run that ended with this code may go on when it is started again."""
    return code in (EXIT_STOPPED, EXIT_FAULT) or code > _SIGNAL


def failures_in_a_row(run: Path, file: Path) -> int:
    """Return how often the run has now ended without a checkpoint that it did not have the time before; 0 after one.

    The count is kept in ``file``. Raises RequestError if it cannot be written.
    """
    newest = max(checkpoints_in(run / "checkpoints"), default=0)
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        step, failures = int(before["step"]), int(before["failures"])
    except (OSError, ValueError, KeyError, TypeError):
        step, failures = 0, 0
    failures = 0 if newest > step else failures + 1
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"step": newest, "failures": failures}) + "\n")
    except OSError as error:  # without a count there is no bound
        raise RequestError(f"{file} cannot be written: {error.strerror}") from None
    return failures
