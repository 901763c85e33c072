"""Observers that recipes name in ``logging.observers``.

An observer is created by calling the registered function or class with the run directory. It gets every event as it is
written (``engine.events``), and `phase` events, on rank 0 and in the training process: slow work belongs in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from trainwright.engine.events import Observer, Record
from trainwright.recipe.registries import OBSERVERS


def observers_named(names: Iterable[str], run: Path, tell: Callable[[str], None]) -> list[Observer]:
    """Return the observers of these names for a run.

    Args:
        tell: shows the user a line about an observer that failed.

    Raises:
        RequestError: as ``Registry.get``.
    """
    return [_Guarded(name, OBSERVERS.get(name)(run), tell) for name in names]


class _Guarded:
    """An observer whose errors do not end a run: after the first one it gets no more events."""

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
            reason = f"{type(error).__name__}: {error}"
            self._tell(f"observer {self._name} failed at {event['event']} ({reason}); it receives no more events")
