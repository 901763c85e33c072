"""Which copies of a run are to be removed, as a rewind has abandoned their course. Imports no torch."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

from trainwright.engine.checkpoints.places import Place
from trainwright.engine.checkpoints.stored_run import EVENTS, StoredRun
from trainwright.paths import write_file

_FILE = ".abandoned"  # in the directory of checkpoints: the step of every place by its root
_lock = threading.Lock()


class Abandoned:
    """The copies in one place that a run has abandoned.

    The place may not be reachable when the run goes back, and this process may end before it is. So a file says what
    is to be removed, until that is done: a later launch must not resume from these copies.

    Args:
        checkpoints: directory of the run's checkpoints.

    Attributes:
        step: copies of this step and later ones are abandoned, as far as this run has written them; None: nothing is.
    """

    def __init__(self, checkpoints: Path, place: Place) -> None:
        self._file, self._root, self._events = checkpoints / _FILE, place.root, checkpoints.parent / EVENTS
        self.step: int | None = _read(self._file).get(self._root)

    def add(self, step: int) -> None:
        """Abandon the copies of ``step`` and later ones."""
        with _lock:
            self.step = step if self.step is None else min(step, self.step)
            self._write(self.step)

    def removed(self, step: int) -> None:
        """Report that the copies of ``step`` and later ones have been removed."""
        with _lock:
            if self.step == step:
                self.step = None
                self._write(None)

    def has(self, step: int, stored: StoredRun | None) -> bool:
        """Return whether the copy of ``step`` is abandoned. Raises OSError.

        A copy of another machine, which the run has gone on with from there, is not: it has other events.
        """
        return self.step is not None and step >= self.step and (stored is None or stored.begins(self._events))

    def _write(self, step: int | None) -> None:
        known = _read(self._file)
        changed = {name: value for name, value in known.items() if name != self._root}
        if step is not None:
            changed[self._root] = step
        if changed == known:
            return
        with suppress(OSError):  # this launch knows it in any case
            if changed:
                write_file(self._file, json.dumps(changed))
            else:
                self._file.unlink()


def forget_abandoned(checkpoints: Path) -> None:
    """Forget what is abandoned, as the run goes on with the events of another machine. Raises OSError."""
    (checkpoints / _FILE).unlink(missing_ok=True)


def _read(file: Path) -> dict[str, int]:
    try:
        return {str(root): int(step) for root, step in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
