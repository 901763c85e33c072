"""Typed access to the keys of one part of an Accelerate file, and what they are translated to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.compatibility.accelerate.reading import AccelerateConfig

_TRUE = ("true", "yes", "on", "1", "y", "t")
_FALSE = ("false", "no", "off", "0", "n", "f")


class ConfigSection:
    """One mapping of a source. Keys that are never read are unknown and are reported at the end."""

    def __init__(self, source: AccelerateConfig, path: tuple[str, ...] = (), prefix: str = "") -> None:
        """Wrap the mapping at ``path``; ``prefix`` is what Accelerate puts before a key that was written without it."""
        self.source, self.path = source, path
        self.problems: list[str] = []
        values: Any = source.values
        for name in path:
            values = values.get(name)
        if values is not None and not isinstance(values, dict):
            self.problems.append(f"{source.place(*path)}: {'.'.join(path)}: expected keys and values under it")
        self._written: dict[str, str] = {}  # the full name -> the name as written
        self._values: dict[str, Any] = {}
        for key, value in (values if isinstance(values, dict) else {}).items():
            name = key if key.startswith(prefix) else prefix + key
            self._written[name] = key
            self._values[name] = value
        self._read_keys: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Return whether the key has a value; null, none and an empty value do not count."""
        return self._values.get(key) not in (None, "", {}, [])

    def given(self) -> list[str]:
        """Return the keys that are written."""
        return list(self._values)

    def raw(self, key: str) -> Any:
        """Return the value of a key as it is written."""
        self._read_keys.add(key)
        return self._values.get(key)

    def text(self, key: str) -> str | None:
        """Return the value of a key as text."""
        value = self.raw(key)
        return None if key not in self else str(value).strip()

    def flag(self, key: str) -> bool | None:
        """Read true or false as YAML, JSON, Python and Accelerate's own wizard write them."""
        text = self.text(key)
        if text is None:
            return None
        if text.lower() not in _TRUE + _FALSE:
            self.wrong(key, "true or false")
            return None
        return text.lower() in _TRUE

    def count(self, key: str, least: int = 0) -> int | None:
        """Return the value of a key as a whole number of at least ``least``."""
        text = self.text(key)
        if text is None:
            return None
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            self.wrong(key, f"a whole number of at least {least}")
            return None
        return number

    def decimal(self, key: str) -> float | None:
        """Return the value of a key as a number."""
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            self.wrong(key, "a number")
            return None

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """Return one of ``choices`` (in capitals), or the one of its number counted from 1, as Accelerate's wizard
        stores some.
        """
        text = self.text(key)
        if text is None:
            return None
        if text.isdigit() and 1 <= int(text) <= len(choices):
            return choices[int(text) - 1]
        if text.upper() not in choices:
            near = difflib.get_close_matches(text.upper(), choices, n=1)
            self.wrong(key, " or ".join(choices), f"; did you mean {near[0]}?" if near else "")
            return None
        return text.upper()

    def names(self, key: str) -> list[str]:
        """Return a list, from a list or comma-separated text; also from the text of a list, which Accelerate may pass
        on.
        """
        value = self.raw(key)
        items = value if isinstance(value, list) else str(value).split(",") if key in self else []
        return [name for item in items if (name := str(item).strip("[]'\" "))]

    def place(self, key: str) -> str:
        """Return where and how the key was written, for messages: `file.yaml:3: num_processes: 4`."""
        written = self._written.get(key, key)
        return f"{self.source.place(*self.path, written)}: {written}: {self._shown(key)}"

    def wrong(self, key: str, expected: str, hint: str = "") -> None:
        """Add the problem that the value of a key is invalid."""
        where = self.source.place(*self.path, self._written.get(key, key))
        self.problems.append(f"{where}: {key}: expected {expected}, not {self._shown(key)}{hint}")

    def unknown(self, supported: Iterable[str], elsewhere: dict[str, str]) -> list[str]:
        """Return a line for every key that was not read. ``elsewhere``: keys of other parts, and which part."""
        lines = []
        for key in self._values:
            if key in self._read_keys:
                continue
            written = self._written[key]
            near = difflib.get_close_matches(key, list(supported), n=1, cutoff=0.7)
            part = elsewhere.get(written)
            hint = f"; it belongs under {part}" if part else f"; did you mean {near[0]}?" if near else ""
            name = ".".join((*self.path, written))
            lines.append(f"{self.source.place(*self.path, written)}: {name}: unknown key{hint}")
        return lines

    def _shown(self, key: str) -> str:
        value = self._values.get(key)
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)


@dataclass(frozen=True)
class RecipeValue:
    """The value of a recipe key, and its origin for messages."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Note:
    """Keys that have no effect here, or another one, and why."""

    keys: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class ConfigProblem:
    """An unsupported setting. ``for_script``: even if Accelerate's own library does the training."""

    text: str
    for_script: bool


@dataclass
class Draft:
    """Collect settings, notes and problems."""

    settings: dict[str, RecipeValue] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[ConfigProblem] = field(default_factory=list)

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a recipe key. A second value that differs is a problem that names both origins."""
        earlier = self.settings.get(key)
        if earlier is not None and earlier.value != value:
            self.problem(f"{earlier.origin} contradicts {origin}; both decide {key}")
            return
        self.settings[key] = earlier or RecipeValue(value, origin)

    def note(self, keys: str, reason: str) -> None:
        """Add a note; notes with the same reason are joined."""
        for index, note in enumerate(self.notes):
            if note.reason == reason:
                self.notes[index] = Note((*note.keys, keys), reason)
                return
        self.notes.append(Note((keys,), reason))

    def problem(self, text: str, *, for_script: bool = False) -> None:
        """Add a problem with the file."""
        self.problems.append(ConfigProblem(text, for_script))
