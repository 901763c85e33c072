"""Whether a run that has ended is worth another start, and how often it has had one without getting further."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.engine.checkpoints.manifest import checkpoints_in
from trainwright.errors import EXIT_FAULT, EXIT_STOPPED, MachineError, RequestError
from trainwright.paths import write_file
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.engine.checkpoints.places import Place

MOST_FAILURES = 3  # in a row, without a new checkpoint
_SIGNAL = 128  # a shell's code of a process that a signal ended is this and its number


def may_continue(code: int) -> bool:
    """Return whether a run that ended with this code may go on when it is started again."""
    return code in (EXIT_STOPPED, EXIT_FAULT) or code > _SIGNAL


def failures_in_a_row(run: Path, file: Path, count_in: str | None = None) -> int:
    """Return how often the run has now ended without a checkpoint that it did not have the time before; 0 after one.

    The count is kept in ``file``. Raises RequestError if it cannot be written.

    Args:
        count_in: a place of the run's copies, where the count is kept too: the next time may be on another machine.
    """
    if count_in is not None:
        with _place(count_in, run) as place:
            _take(place.read_attempts(), file)
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
    if count_in is not None:
        with _place(count_in, run) as place:
            place.write_attempts(file.read_text(encoding="utf-8"))
    return failures


def _take(found: str | None, file: Path) -> None:
    if found is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, found)


@contextmanager
def _place(where: str, run: Path) -> Iterator[Place]:
    """Yield the place of the run's copies. If it cannot be used, the count is that of this machine."""
    from trainwright.engine.checkpoints.places import Place
    from trainwright.engine.checkpoints.stored_run import name_in_places

    try:
        place = Place(where, name_in_places(run))
        with place.in_words():
            yield place
    except (RequestError, MachineError) as error:
        say(f"warning: attempts are counted on this machine only: {error}", file=sys.stderr)
