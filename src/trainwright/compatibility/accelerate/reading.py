"""Read an Accelerate file, or the environment that Accelerate gives a worker: one plain mapping, with typed access.

Files are YAML or JSON whatever their ending. Loose JSON is accepted: Python's True, False and None, single quotes,
commas before a closing bracket, comments.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.recipe.files import parse_json, read_text
from trainwright.recipe.yaml_text import Tree, parse_mapping
from trainwright.utils.text import quote_word

Place = tuple[str, ...]

_KEY = re.compile(r"""^[ \t{]*["']?[A-Za-z_]\w*["']?\s*:""", re.MULTILINE)
_OF_DEEPSPEED = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
_ENUMS = ("compute_environment", "distributed_type")


@dataclass(frozen=True)
class AccelerateConfig:
    """The settings that Accelerate was given. ``values`` is nested as in a file; ``places`` says where each key was
    written.

    Attributes:
        name: the path of the file as given, or another source of the values.
        directory: the base of relative paths in it; None for an environment.
        remarks: why Accelerate's own reader rejects the file although this one accepts it.
        problems: faults of the text itself, such as a key given twice.
        stated: False if Accelerate fills in its defaults, so that a default need not be a choice of the user.
        device_stated: False if it is unknown whether GPUs are meant.
        one_of_several: Accelerate was asked for several processes and started one.
    """

    name: str
    values: dict[str, Any]
    places: Mapping[Place, str] = field(default_factory=dict)
    directory: Path | None = None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    stated: bool = True
    device_stated: bool = True
    one_of_several: bool = False

    def place(self, *path: str) -> str:
        """Return where ``path`` was written, for a message: file:line, or a variable's name."""
        return self.places.get(path, self.name)

    def replace_settings(self, settings: Mapping[str, str]) -> AccelerateConfig:
        """Return a copy in which options of a command, such as ``mixed_precision``, replace the keys."""
        values = {**self.values, **settings}
        part = values.get("dynamo_config")
        if "dynamo_backend" in settings and isinstance(part, dict):
            without = {key: value for key, value in part.items() if key.removeprefix("dynamo_") != "backend"}
            values["dynamo_config"] = without
        options: dict[Place, str] = {(key,): f"--{key.replace('_', '-')}" for key in settings}
        return replace(self, values=values, places={**self.places, **options})


def locate_default_file() -> Path:
    """Return where `accelerate config` writes and `accelerate launch` reads: below HF_HOME or the user's cache.

    The path begins with ``~`` for a user without a home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    # Unlike a path that a user has written, it may have no home directory to be in.
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def build_default_config(on_cpu: bool) -> AccelerateConfig:
    """Return what a command without a file asks for: data parallelism on the devices of this machine."""
    return AccelerateConfig("the command line", {"distributed_type": "MULTI_CPU" if on_cpu else "MULTI_GPU"})


def read(path: Path) -> AccelerateConfig:
    """Read an Accelerate file.

    Raises RequestError, with the line if known, if the file does not exist or holds no mapping.
    """
    text = read_text(path)
    if not text.strip():
        raise RequestError(f"{path}: is empty; write one with `trainwright setup --config-file {quote_word(path)}`")
    strict = _parse_strict_json(text)
    is_json = text.lstrip().startswith("{")
    if strict is None and (not _KEY.search(text) or text.lstrip().startswith("[")):
        raise RequestError(f"{path}: is not an Accelerate file: it has no 'key: value', such as distributed_type: NO")
    tree = _parse_loose_json(text, path) if is_json else parse_mapping(text, str(path))
    values = _normalize_values(strict if strict is not None else tree.values)
    if "distributed_type" not in values and any(key in values for key in _OF_DEEPSPEED):
        return _wrap_deepspeed_file(path)
    return AccelerateConfig(
        name=str(path),
        values=values,
        places={tuple(map(str, path_of_key)): str(origin) for path_of_key, origin in tree.origins.items()},
        directory=path.parent,
        problems=tuple(map(str, tree.problems)),
        remarks=tuple(_list_remarks(path, values, strict=strict is not None, is_json=is_json)),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that an Accelerate file names; loose JSON is accepted. Raises RequestError."""
    text = read_text(path)
    strict = _parse_strict_json(text)
    if strict is not None:
        return strict
    if not text.lstrip().startswith("{"):
        raise RequestError(f"{path}: is not a JSON object")
    values: dict[str, Any] = _normalize_values(_parse_loose_json(text, path).values)
    return values


def _wrap_deepspeed_file(path: Path) -> AccelerateConfig:
    """Return a DeepSpeed file in place of the Accelerate file that would name it."""
    return AccelerateConfig(
        name=str(path),
        values={"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(path)}},
        directory=Path(),
        remarks=("it is a DeepSpeed file, which an Accelerate file names by deepspeed_config_file",),
        device_stated=False,
    )


def _parse_strict_json(text: str) -> dict[str, Any] | None:
    try:
        values = parse_json(text, "")
    except RequestError:
        return None
    return values if isinstance(values, dict) else None


def _parse_loose_json(text: str, path: Path) -> Tree:
    try:
        return parse_mapping(_remove_comments(text), str(path))
    except RequestError as error:
        raise RequestError(str(error).replace(": not valid YAML: ", ": not valid JSON: ")) from None


def _remove_comments(text: str) -> str:
    """Convert loose JSON to YAML's flow style by removing // comments and tabs; line numbers are preserved."""

    def replaced(match: re.Match[str]) -> str:
        token = match.group()
        if token[0] == "'":
            return token.replace("\\'", "''")
        if token[0] == '"':
            return token
        return "\n" * token.count("\n") if token.startswith("/") else "  "

    return re.sub(
        # An unclosed string is taken to its end: retrying from each of its characters would take forever.
        r""" "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? | //[^\n]* | /\*.*?(?:\*/|\Z) | \t """,
        replaced,
        text,
        flags=re.VERBOSE | re.DOTALL,
    )


def _normalize_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _normalize_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize_values(item) for item in value]
    return None if value in ("None", "") else value


def _list_remarks(path: Path, values: dict[str, Any], *, strict: bool, is_json: bool) -> list[str]:
    """Return why `accelerate launch` 1.15 rejects the file: it depends on the file's ending and on capitals."""
    remarks = []
    if path.suffix == ".json" and not strict:
        remarks.append("is not strict JSON" if is_json else "is YAML under a name that ends in .json")
    lower = [key for key in _ENUMS if isinstance(values.get(key), str) and values[key] != values[key].upper()]
    if lower:
        remarks.append(f"{' and '.join(lower)} not in capitals")
    if "distributed_type" not in values:
        remarks.append("no distributed_type")
    return remarks


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
        """Return one of ``choices`` (in capitals), or that of its number from 1, as Accelerate's wizard stores some."""
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
        """Return a list, from a list or comma-separated text, or the text of a list, as Accelerate may pass it on."""
        value = self.raw(key)
        items = value if isinstance(value, list) else str(value).split(",") if key in self else []
        return [name for item in items if (name := str(item).strip("[]'\" "))]

    def place(self, key: str) -> str:
        """Return where and how the key was written, for messages: `file.yaml:3: num_processes: 4`."""
        written_key = self._written.get(key, key)
        return f"{self.source.place(*self.path, written_key)}: {written_key}: {self._shown(key)}"

    def wrong(self, key: str, expected: str, hint: str = "") -> None:
        """Add the problem that the value of a key is invalid."""
        location = self.source.place(*self.path, self._written.get(key, key))
        self.problems.append(f"{location}: {key}: expected {expected}, not {self._shown(key)}{hint}")

    def unknown(self, supported: Iterable[str], elsewhere: dict[str, str]) -> list[str]:
        """Return a line for every key that was not read. ``elsewhere``: keys of other parts, and which part."""
        lines = []
        for key in self._values:
            if key in self._read_keys:
                continue
            written_key = self._written[key]
            near = difflib.get_close_matches(key, list(supported), n=1, cutoff=0.7)
            part = elsewhere.get(written_key)
            hint = f"; it belongs under {part}" if part else f"; did you mean {near[0]}?" if near else ""
            name = ".".join((*self.path, written_key))
            lines.append(f"{self.source.place(*self.path, written_key)}: {name}: unknown key{hint}")
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
