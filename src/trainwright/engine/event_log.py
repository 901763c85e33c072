"""Write a run's events to ``events.jsonl``, one JSON object per line, and pass them to the observers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainwright.engine.events import Event, Observer, Record
from trainwright.errors import TrainingError, unwritable

_PROGRESS_SECONDS = 0.2


class EventLog:
    """Append events to a file and pass each to the observers. Only rank 0 has a path; other ranks write nothing.

    A line is written in one call and flushed, so a killed run leaves at most one incomplete line, which is removed on
    resume. Floats are written with full precision; numbers that JSON cannot represent are written by name.

    Raises:
        RequestError: something else is in the place of the file or its directory.
        MachineError: the file cannot be opened.
    """

    def __init__(self, path: Path | None, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)
        self._path = path
        self._file = None
        self._progress_sent_at = float("-inf")  # when `progress` was last passed on
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _drop_cut_line(path)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise unwritable(path, error) from error

    def follow(self, observer: Observer) -> None:
        """Add an observer, which may emit events itself."""
        self._observers.append(observer)

    def emit(self, event: Event) -> None:
        """Record an event, with the time in seconds since the epoch.

        Raises:
            TrainingError: the file no longer exists, usually because the run directory was removed.
        """
        if self._file is None or self._path is None:
            return
        if _is_gone(self._path):
            raise TrainingError(
                f"{self._path} is gone: the run's directory was deleted or moved, or its file system is no longer "
                "mounted; restore it, or --resume the run at its new path"
            )
        record = _record(event)
        try:
            self._file.write(_line(record))
            self._file.flush()
        except OSError as error:
            # A full disk must not end a run that can still train; the observers report it on the console.
            record = {**record, "write_error": str(error)}
        self._show(record)

    def announce(self, doing: str, step: int | None = None) -> None:
        """Tell the observers what the run does until the next event; nothing is recorded."""
        if self._file is not None:
            self._show({"event": "phase", "time": time.time(), "doing": doing, "step": step})

    def progress(self, done: int, total: int) -> None:
        """Tell the observers how much of what was announced is done, at most five times a second; not recorded."""
        if self._file is not None and total and (now := time.monotonic()) - self._progress_sent_at >= _PROGRESS_SECONDS:
            self._progress_sent_at = now
            self._show({"event": "progress", "time": time.time(), "done": done, "total": total})

    def _show(self, event: Record) -> None:
        for observer in self._observers:
            with suppress(OSError):  # observers may write to a full disk, too
                observer(event)

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def append_event(path: Path, event: Event) -> None:
    """Add an event to the log of a run from another process than its rank 0. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(_record(event)))


def _record(event: Event) -> Record:
    return {"event": event.kind_of_event, "time": time.time(), **event.record()}


def _line(record: Record) -> str:
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def _is_gone(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # a file system that does not respond now may respond later
        return False
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    return str(value) if isinstance(value, os.PathLike) else value


def _drop_cut_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
