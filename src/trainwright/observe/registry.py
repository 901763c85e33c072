"""Observers that recipes name in ``logging.observers``.

An observer is made by calling what is registered with the run's directory. It is shown every event as it is written
(``engine.events``), and `phase` events beside them, on rank 0 and in the training process: what takes long belongs in
a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from trainwright.engine.events import Observer, Record
from trainwright.registries import OBSERVERS


def observers_named(names: Iterable[str], run: Path, tell: Callable[[str], None]) -> list[Observer]:
    """Return the observers of these names for a run.

    Args:
        tell: shows the user a line, about an observer that failed.

    Raises:
        RequestError: as ``Registry.get``.
    """
    return [_Guarded(name, OBSERVERS.get(name)(run), tell) for name in names]


class _Guarded:
    """An observer whose errors do not end a run: after the first one it is shown nothing more."""

    def __init__(self, name: str, observer: Observer, tell: Callable[[str], None]) -> None:
        self._name = name
        self._tell = tell
        self._observer: Observer | None = observer

    def __call__(self, event: Record) -> None:
        if self._observer is None:
            return
        try:
            self._observer(event)
        except Exception as error:
            self._observer = None
            said = f"{type(error).__name__}: {error}"
            self._tell(f"observer {self._name} failed at {event['event']} ({said}); it is shown nothing more")
