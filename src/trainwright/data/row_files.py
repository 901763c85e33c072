"""Rows out of JSON, JSONL, CSV and text files, one at a time, each with the line it begins on.

The files are parsed here, and not by a library, for the sake of the message when one of them is wrong: it
names the file, the line and the reason. It also keeps values as they are written (others read dates into time
stamps).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from trainwright.errors import RequestError

Row: TypeAlias = dict[str, Any]
LocatedRow: TypeAlias = tuple[int, Row]  # (line, row)

_DEEPEST = 32  # levels of objects and lists; Arrow's files end at 64
_TOO_DEEP = f"nested more than {_DEEPEST} deep"


def iterate_rows(path: Path) -> Iterator[LocatedRow]:
    """``(line, row)`` for every row of a file, read as its suffix says.

    Raises:
        RequestError: ``file:line: reason`` where it cannot be parsed or a row is not an object.
    """
    return READERS[path.suffix.lower()](path)


def _json(path: Path) -> Iterator[LocatedRow]:
    """An array of objects or of texts, or an object that holds one such list; also JSONL under the wrong name."""
    text = read_text(path)
    start = _skip_space(text, 0)
    if text[start : start + 1] == "{":
        first, newline, rest = text[start:].partition("\n")
        if newline and rest.strip() and _is_object(first):
            yield from _jsonl(path)
            return
        start = _only_list(path, text, start)
    if text[start : start + 1] != "[":
        raise _wrong(path, text, start, "a list of objects should stand here")
    yield from _array(path, text, start)


def _array(path: Path, text: str, start: int) -> Iterator[LocatedRow]:
    position, line, counted = _skip_space(text, start + 1), 1, 0
    mark = text[position : position + 1]
    if mark == "]":
        return
    texts = mark == '"'  # a plain list of texts, as MUSE's authors keep theirs
    while True:
        line, counted = line + text.count("\n", counted, position), position
        value, position = _value(path, text, position)
        yield line, {"text": value} if texts and isinstance(value, str) else _row(path, line, value)
        position = _skip_space(text, position)
        mark = text[position : position + 1]
        if mark == "]":
            return
        if mark != ",":
            raise _wrong(path, text, position, "',' or ']' should follow a row; is the file cut off?")
        position = _skip_space(text, position + 1)


def _only_list(path: Path, text: str, start: int) -> int:
    """Where the one list among an object's values begins."""
    value, end = _value(path, text, start)
    rest = _skip_space(text, end)
    if rest < len(text):
        raise _wrong(path, text, rest, "one JSON value was read and more follows; is it JSONL (.jsonl)?")
    lists = [key for key, item in value.items() if isinstance(item, list)]
    if len(lists) != 1:
        held = f"{len(lists)} lists ({', '.join(lists)})" if lists else "none"
        raise RequestError(f"{path}: one list of rows should be in this object, and there is {held}")
    position = start + 1
    while True:
        key, position = _value(path, text, _skip_space(text, position))
        position = _skip_space(text, _skip_space(text, position) + 1)  # over the colon
        if key == lists[0] and text[position] == "[":
            return position
        _, position = _value(path, text, position)
        position = _skip_space(text, position) + 1  # over the comma


def _jsonl(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if not raw.strip():
                continue
            try:
                value = json.loads(raw)
            except json.JSONDecodeError as error:
                hint = "; is it JSON (.json)?" if line == 1 and raw.strip() in (b"[", b"{") else ""
                raise RequestError(f"{path}:{line}: not JSON: {error.msg} (column {error.colno}){hint}") from None
            except UnicodeDecodeError:
                raise RequestError(f"{path}:{line}: not UTF-8 text") from None
            except RecursionError:
                raise RequestError(f"{path}:{line}: {_TOO_DEEP}") from None
            yield line, _row(path, line, value)


def _csv(path: Path) -> Iterator[LocatedRow]:
    """Every value is text, as the file does not say otherwise; an empty field is empty text."""
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next((fields for fields in reader if any(map(str.strip, fields))), [])
            before = reader.line_num
            _check_header(path, before, header)
            for fields in reader:
                line, before = before + 1, reader.line_num
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise RequestError(
                        f"{path}:{line}: {len(fields)} fields where the header has {len(header)} "
                        f"({', '.join(header)}); is a comma or a quote not escaped?"
                    )
                yield line, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise RequestError(f"{path}:{reader.line_num}: not CSV: {error}") from None
        except UnicodeDecodeError:
            raise _undecodable(path) from None


def _check_header(path: Path, line: int, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise RequestError(f"{path}:{line}: the header names {', '.join(map(repr, twice))} more than once")


def _plain(path: Path) -> Iterator[LocatedRow]:
    """Paragraphs: what stands between empty lines is one row ``{"text"}``."""
    first = 0
    lines: list[str] = []
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    first = first if lines else number
                    lines.append(line)
                elif lines:
                    yield first, {"text": "".join(lines).rstrip()}
                    lines = []
        except UnicodeDecodeError:
            raise _undecodable(path) from None
    if lines:
        yield first, {"text": "".join(lines).rstrip()}


READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _csv,
    ".tsv": _csv,
    ".txt": _plain,
    ".md": _plain,
}


def read_text(path: Path) -> str:
    """A whole file. Raises RequestError with the line that is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise _undecodable(path) from None


def _undecodable(path: Path) -> RequestError:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            try:
                raw.decode()
            except UnicodeDecodeError:
                return RequestError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8")
    return RequestError(f"{path}: not UTF-8 text; save the file as UTF-8")


def _value(path: Path, text: str, position: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise RequestError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise RequestError(f"{path}:{text.count(chr(10), 0, position) + 1}: {_TOO_DEEP}") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (json.JSONDecodeError, RecursionError):
        return False


def _row(path: Path, line: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise RequestError(f"{path}:{line}: a row is an object with named fields, and this is {kind_of(value)}")
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return value
    raise RequestError(f"{path}:{line}: {_TOO_DEEP}")


def kind_of(value: object) -> str:
    """A JSON value's type in words."""
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "empty (null)")


def _wrong(path: Path, text: str, position: int, reason: str) -> RequestError:
    return RequestError(f"{path}:{text.count(chr(10), 0, position) + 1}: not JSON rows: {reason}")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
