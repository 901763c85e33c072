"""Read settings files of users within limits: an invalid or hostile file gives an error message, never a crash."""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.utils.installation import list_shipped_recipes

DEEPEST = 64  # levels of mappings and lists; files written by people stay far below
# In bytes. YAML takes seconds per MiB to read; people write a few thousand bytes.
_LARGEST_YAML, _LARGEST_JSON = 2**20, 16 * 2**20
_SPECIAL = ((stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"))


def read_text(path: Path, max_bytes: int = _LARGEST_YAML) -> str:
    """Return a settings file as text. Raises RequestError if it is unreadable, no text or above ``max_bytes``."""
    try:
        if (kind := describe_special_file(path)) is not None:
            raise RequestError(f"{path}: is {kind}, not a file")
        with path.open("rb") as file:  # it may be an endless pipe
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise RequestError(describe_missing_file(path)) from None
    except IsADirectoryError:
        has_recipe = (path / "recipe.yaml").is_file()
        fix = f"pass the recipe in it, {path / 'recipe.yaml'}" if has_recipe else "pass a file"
        raise RequestError(f"{path}: is a directory; {fix}") from None
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise RequestError(f"{path}: is larger than {max_bytes / 2**20:.0f} MiB, too large for a settings file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RequestError(f"{path}:{line}: is not UTF-8 text") from None


def describe_special_file(path: Path) -> str | None:
    """Return the kind of a special file, such as ``a named pipe``, which might block without end.

    Return None for a file, a directory, and a pipe from another command: ``<(command)`` of a shell, or /dev/stdin.

    Raises:
        OSError: the path does not exist or is not accessible.
    """
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode):
        return None if os.path.realpath(path).startswith(("/dev/", "/proc/")) else "a named pipe"
    return next((name for is_one, name in _SPECIAL if is_one(mode)), None)


def describe_missing_file(path: Path) -> str:
    """Return a message that there is no file at ``path``: what exists instead, or the most similar name."""
    if path.exists():
        return f"{path}: is {describe_special_file(path) or 'a directory'}, not a file"
    directory = path.parent
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {directory / close[0]}?" if close else ""
    if path.parts[:1] == ("recipes",) and (name := "/".join(path.with_suffix("").parts[1:])) in list_shipped_recipes():
        hint = f"; trainwright recipe new {name} writes it"
    return f"{path}: no such file{hint}"


def read_json(path: Path, source: str | None = None, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Parse a JSON file like ``parse_json``; messages name it ``source``, or by its path."""
    return parse_json(read_text(path, _LARGEST_JSON), source or str(path), pairs)


def parse_json(text: str, source: str, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Parse JSON ``text``; ``source`` names it in messages. ``pairs`` makes an object of its keys and values.

    Raises:
        RequestError: it is not JSON, with line and column, or nested more than ``DEEPEST`` deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise RequestError(f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise _build_depth_error(source) from None
    except ValueError as error:  # of `pairs`, and of numbers with thousands of digits
        raise RequestError(f"{source}: {error}") from None
    if is_deeper(value, DEEPEST):
        raise _build_depth_error(source)
    return value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Return whether dicts and lists are nested more than ``max_depth`` deep in a value."""
    level = [value]
    for _ in range(max_depth):
        level = [item for container in level for item in _list_items(container)]
        if not level:
            return False
    return True


def _list_items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list)]
    return [item for item in value if isinstance(item, dict | list)] if isinstance(value, list) else []


def _build_depth_error(source: str) -> RequestError:
    return RequestError(f"{source}: nested more than {DEEPEST} deep")
