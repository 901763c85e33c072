"""Intermediate results of translating an Accelerate file to recipe keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """The value of a recipe key, and its origin for messages."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Note:
    """Keys that have no effect here, or another one, and why."""

    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Problem:
    """An unsupported setting. ``for_script``: even if Accelerate's own library does the training."""

    text: str
    for_script: bool


@dataclass
class Draft:
    """Collect settings, notes and problems."""

    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a recipe key. A second value that differs is a problem that names both origins."""
        earlier = self.settings.get(key)
        if earlier is not None and earlier.value != value:
            self.problem(f"{earlier.origin} contradicts {origin}; both decide {key}")
            return
        self.settings[key] = earlier or Setting(value, origin)

    def note(self, keys: str, reason: str) -> None:
        """Add a note; notes with the same reason are joined."""
        for index, note in enumerate(self.notes):
            if note.reason == reason:
                self.notes[index] = Note((*note.keys, keys), reason)
                return
        self.notes.append(Note((keys,), reason))

    def problem(self, text: str, *, for_script: bool = False) -> None:
        """Add a problem with the file."""
        self.problems.append(Problem(text, for_script))
