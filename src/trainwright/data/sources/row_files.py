"""Read rows from JSON, JSONL, CSV, text and document files, each with the line number it starts on.

The files are parsed here instead of by a library so that errors name the file, the line and the reason. It also keeps
values as they are written (some libraries convert dates to timestamps).

Common deviations are accepted: JSON lines in a .json file and an array in a .jsonl file, objects over several lines,
CSV with semicolons, tabs or bars, byte order marks, and NaN, which pandas writes for an empty cell and which becomes
null.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from trainwright.errors import MachineError, RequestError
from trainwright.utils.installation import install_command
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from docx.table import Table


Row: TypeAlias = dict[str, Any]
LocatedRow: TypeAlias = tuple[int, Row]  # (line, row)

# Other names of the column ``messages``, and the names of the content of a turn.
MESSAGES_NAMES = ("conversation", "conversations", "dialogue", "dialog", "chat", "turns")
CONTENTS = ("content", "value")
# Names of the columns with answers to compare.
CHOSEN_NAMES = ("chosen_response", "response_chosen", "preferred", "preferred_output", "response_j")
REJECTED_NAMES = ("rejected_response", "response_rejected", "dispreferred", "non_preferred_output", "response_k")
ANSWERS_NAMES = ("chosen", "rejected", *CHOSEN_NAMES, *REJECTED_NAMES)

_DEEPEST = 32  # levels of objects and lists; Arrow files support at most 64
_TOO_DEEP = f"nested more than {_DEEPEST} deep"
_LONE_RETURNS = (
    "a carriage return (\\r) without a line feed (\\n) outside of quotes; save the file with the line ends of Linux or "
    "Windows"
)
_DELIMITERS = ",;\t|"
_SAMPLE = 2**16  # characters read to detect the delimiter
_CONVERSATIONS = ("messages", "conversations")  # lists inside an object that is itself a row


def iterate_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield ``(line, row)`` for every row of a file; the suffix selects the format.

    Raises:
        RequestError: the file cannot be parsed or a row is not an object; the message is ``file:line: reason``.
    """
    return READERS[parse_suffix(path)](path)


def _iterate_json(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of an array of objects or texts, of an object with one such list, or of consecutive objects."""
    first = list(islice(((line, raw) for line, raw in iterate_numbered_lines(path) if raw.strip()), 2))
    if len(first) == 2 and first[0][1].lstrip().startswith(b"{") and _is_object(first[0][1]):
        yield from _iterate_line_objects(path)
    else:
        yield from _iterate_values(path)


def _iterate_jsonl(path: Path) -> Iterator[LocatedRow]:
    first = next((raw.strip() for _, raw in iterate_numbered_lines(path) if raw.strip()), b"")
    yield from _iterate_values(path) if first.startswith(b"[") or first == b"{" else _iterate_line_objects(path)


def _iterate_line_objects(path: Path) -> Iterator[LocatedRow]:
    for line, text in enumerate(_iterate_text_lines(path), start=1):
        if not text.strip():
            continue
        value, end = _parse_value(path, text, _skip_space(text, 0), line)
        if (rest := _skip_space(text, end)) < len(text):
            extra = f"extra data after the object (column {end + 1}); write one row per line"
            why = _LONE_RETURNS if "\r" in text[end:rest] else extra
            raise RequestError(f"{path}:{line}: not JSON: {why}")
        yield line, _check_row(path, line, value, text)


def _iterate_values(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a file that is read into memory as a whole."""
    text = read_text(path)
    start = _skip_space(text, 0)
    if text[start : start + 1] == "{":
        value, end = _parse_value(path, text, start)
        if text[_skip_space(text, end) : _skip_space(text, end) + 1] == "{":
            yield from _iterate_objects(path, text, start)
            return
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if len(lists) == 1 and lists[0] in _CONVERSATIONS and _skip_space(text, end) == len(text):
            yield text.count("\n", 0, start) + 1, _check_row(path, 1, value, text)
            return
        start = _find_only_list(path, text, start)
    if text[start : start + 1] != "[":
        raise _build_json_error(path, text, start, "expected a list of objects")
    end = yield from _iterate_array(path, text, start)
    rest = _skip_space(text, end)
    if start == _skip_space(text, 0) and rest < len(text):  # an object was already read to its end
        raise _build_json_error(path, text, rest, "extra data after the list; write one object per line, or one list")


def _iterate_objects(path: Path, text: str, position: int) -> Iterator[LocatedRow]:
    line, last_position = 1, 0
    while position < len(text):
        line, last_position = line + text.count("\n", last_position, position), position
        value, end = _parse_value(path, text, position)
        yield line, _check_row(path, line, value, text[position:end])
        position = _skip_space(text, end)


def _iterate_array(path: Path, text: str, start: int) -> Generator[LocatedRow, None, int]:
    """Yield the items of a list as rows; return the position after the list."""
    position, line, last_position = _skip_space(text, start + 1), 1, 0
    mark = text[position : position + 1]
    if mark == "]":
        return position + 1
    texts = mark == '"'  # a plain list of texts, the format of the MUSE data
    while True:
        line, last_position = line + text.count("\n", last_position, position), position
        value, end = _parse_value(path, text, position)
        row = {"text": value} if texts and isinstance(value, str) else value
        yield line, _check_row(path, line, row, text[position:end])
        position = _skip_space(text, end)
        mark = text[position : position + 1]
        if mark == "]":
            return position + 1
        if mark != ",":
            raise _build_json_error(path, text, position, "',' or ']' should follow a row; is the file cut off?")
        position = _skip_space(text, position + 1)


def _find_only_list(path: Path, text: str, start: int) -> int:
    """Return the position of the only list among an object's values."""
    value, end = _parse_value(path, text, start)
    rest = _skip_space(text, end)
    if rest < len(text):
        raise _build_json_error(path, text, rest, "extra data after the JSON value; write one row per line (.jsonl)")
    lists = [key for key, item in value.items() if isinstance(item, list)]
    if len(lists) != 1:
        summary = f"{len(lists)} lists ({', '.join(lists[:8])})" if lists else "none"
        raise RequestError(
            f"{path}: expected one list of rows in the object, found {summary}; write one row per line (.jsonl), and "
            "each list of rows in its own file"
        )
    position = start + 1
    while True:
        key, position = _parse_value(path, text, _skip_space(text, position))
        position = _skip_space(text, _skip_space(text, position) + 1)  # skip the colon
        if key == lists[0] and text[position] == "[":
            return position
        _, position = _parse_value(path, text, position)
        position = _skip_space(text, position) + 1  # skip the comma


def _iterate_text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends; raise RequestError if they are not UTF-8."""
    for _, raw in iterate_numbered_lines(path):
        try:
            yield raw.decode()
        except UnicodeDecodeError:
            raise _build_encoding_error(path) from None


def _iterate_csv(path: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a CSV file; every value is text, and an empty field is empty text."""
    csv.field_size_limit(LONGEST_LINE)
    delimiter = _find_delimiter(_iterate_text_lines(path), "\t" if parse_suffix(path) == ".tsv" else ",")
    reader = csv.reader(_iterate_text_lines(path), delimiter=delimiter, strict=True)
    try:
        header = next((fields for fields in reader if any(map(str.strip, fields))), [])
        header = [name.strip() or f"column {number}" for number, name in enumerate(header, start=1)]
        before = reader.line_num
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise RequestError(f"{path}:{before}: the header names {', '.join(map(repr, twice))} more than once")
        for fields in reader:
            line, before = before + 1, reader.line_num
            if not fields:
                continue
            if len(fields) != len(header):
                raise RequestError(
                    f"{path}:{line}: {format_plural(len(fields), 'field')} where the header has {len(header)} "
                    f"({', '.join(header)}); is a comma or a quote not escaped?"
                )
            yield line, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        why = _LONE_RETURNS if str(error).startswith("new-line character") else str(error)
        raise RequestError(f"{path}:{reader.line_num}: not CSV: {why}") from None


def _find_delimiter(text: Iterator[str], usual: str) -> str:
    """Return the delimiter that splits the header into at least two fields and the next line into the same number."""
    sample, size = [], 0
    for line in text:
        sample.append(line)
        if (size := size + len(line)) > _SAMPLE:
            break
    for delimiter in (usual, *_DELIMITERS.replace(usual, "")):
        try:
            records = csv.reader(sample, delimiter=delimiter)
            header, *rest = islice((fields for fields in records if any(map(str.strip, fields))), 2)
        except (csv.Error, ValueError):
            continue
        if len(header) > 1 and all(len(fields) == len(header) for fields in rest):
            return delimiter
    return usual


def _iterate_paragraphs(path: Path) -> Iterator[LocatedRow]:
    """Yield paragraphs, which empty lines separate, as rows ``{"text"}``."""
    first = 0
    paragraph: list[str] = []
    for number, line in enumerate(_iterate_text_lines(path), start=1):
        if "\0" in line:
            raise RequestError(f"{path}:{number}: not text: a zero byte; is it a binary file?")
        if line.strip():
            first = first if paragraph else number
            paragraph.append(line.removesuffix("\n").removesuffix("\r"))
        elif paragraph:
            yield first, {"text": "\n".join(paragraph).rstrip()}
            paragraph = []
    if paragraph:
        yield first, {"text": "\n".join(paragraph).rstrip()}


READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".json": _iterate_json,
    ".jsonl": _iterate_jsonl,
    ".ndjson": _iterate_jsonl,
    ".csv": _iterate_csv,
    ".tsv": _iterate_csv,
    ".txt": _iterate_paragraphs,
    ".md": _iterate_paragraphs,
}


def read_text(path: Path) -> str:
    """Return the text of a whole file; raise RequestError with the line that is not UTF-8."""
    try:
        return read_all(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _build_encoding_error(path) from None


def _build_encoding_error(path: Path) -> RequestError:
    for line, raw in iterate_numbered_lines(path):
        if line == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return RequestError(f"{path}: UTF-16 text; save the file as UTF-8")
        try:
            raw.decode()
        except UnicodeDecodeError:
            return RequestError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8")
    return RequestError(f"{path}: not UTF-8 text; save the file as UTF-8")


def _check_constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a JSON value; use null, or write the number as text")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):  # json would keep the last value only
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in an object; keep one of them")
    return fields


_DECODER = json.JSONDecoder(parse_constant=_check_constant, object_pairs_hook=_build_object)


def _parse_value(path: Path, text: str, position: int, line: int | None = None) -> tuple[Any, int]:
    """Return the value at ``position`` and its end; ``line`` is the line number if ``text`` is a single line."""
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        at = text[error.pos : error.pos + 1]
        unseen = "" if at.isprintable() or at in "\t\r\n" else f" at the invisible character U+{ord(at):04X}; remove it"
        location = f"{path}:{line or error.lineno}"
        raise RequestError(f"{location}: not JSON: {error.msg} (column {error.colno}){unseen}") from None
    except (RecursionError, ValueError) as error:
        why = _TOO_DEEP if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise RequestError(f"{path}:{line or text.count(chr(10), 0, position) + 1}: {why}") from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _check_row(path: Path, line: int, value: Any, text: str) -> Row:
    """Check that a value is a valid row and return it; ``text`` is its JSON source."""
    if not isinstance(value, dict):
        raise RequestError(f"{path}:{line}: a row must be an object with named fields, not {describe_type(value)}")
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            break
    else:
        raise RequestError(f"{path}:{line}: {_TOO_DEEP}")
    escapes = "\\ud" in text or "\\uD" in text  # usually an emoji, but it may be an unpaired surrogate
    if escapes and not _is_encodable(json.dumps(value, ensure_ascii=False)):
        halves = (
            field for field, item in iterate_leaves("", value) if isinstance(item, str) and not _is_encodable(item)
        )
        field = next(halves, "the name of a field")
        raise RequestError(f"{path}:{line}: {field} contains an unpaired surrogate (\\ud800 to \\udfff); remove it")
    return value


def iterate_leaves(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, value)`` for every value of a row that is not null, containers included."""
    if value is None:
        return
    if field:
        yield field, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from iterate_leaves(f"{field}.{key}" if field else key, item)
    elif isinstance(value, list):
        for item in value:
            yield from iterate_leaves(f"{field}[]", item)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def join_texts(parts: list[Any]) -> str | None:
    """Join a list of text parts; return None if any part is not text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(texts) else None


def describe_not_text(parts: list[Any], *, named: bool = False) -> str:
    """Return a message about the first part of a content that is not text, or "" if all are.

    Args:
        named: ignore parts without a type, such as an image has.
    """
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            continue
        if isinstance(kind, str):
            return f"has a part of type {kind}, which is not text; remove the part or the row"
        if not named:
            return f'has a part that is not text; a part is {{"type": "text", "text": "…"}}, not {describe_type(part)}'
    return ""


def to_json(row: Row) -> str:
    """Return a row as one line of JSON; dates and other table values become text, NaN and infinity become null.

    Raises:
        RequestError: a column holds bytes.
    """
    return json.dumps({name: _replace_nan(value) for name, value in row.items()}, ensure_ascii=False, default=_to_text)


def _replace_nan(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_text(value: Any) -> str:
    if isinstance(value, bytes):
        raise RequestError("a column of bytes cannot be written as JSON; remove it")
    return str(value)


def describe_type(value: object) -> str:
    """Return the name of a value's type for messages: of JSON's types, or of those that tables have besides."""
    if isinstance(value, bool):
        return "true or false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
    fallback = "empty (null)" if value is None else f"a value of type {type(value).__name__}"
    return next((name for kind, name in names.items() if isinstance(value, kind)), fallback)


def _build_json_error(path: Path, text: str, position: int, reason: str) -> RequestError:
    return RequestError(f"{path}:{text.count(chr(10), 0, position) + 1}: not JSON rows: {reason}")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


_DOCX = ".docx"
# Files that cannot hold other kinds of rows.
_CODE = """
    .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .swift .js .jsx .ts .tsx .rb .php .pl .lua .r
    .jl .hs .ml .ex .sh .sql .html .css .toml
""".split()  # noqa: SIM905 (a list of names reads better so)
ALONE = frozenset((*_CODE, _DOCX))
SUFFIXES = frozenset((*ALONE, ".txt", ".md"))


def list_documents(directory: Path) -> list[Path]:
    """Return the documents in ``directory`` and its subdirectories, sorted by path, without hidden ones."""
    files = []
    for folder, inside, names in os.walk(directory):
        inside[:] = [name for name in inside if not name.startswith(".") and name != "__pycache__"]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES)


def read_document(path: Path) -> Iterator[LocatedRow]:
    """Yield the file as one row.

    Raises:
        RequestError: the file is not UTF-8 text or not a Word file.
        MachineError: python-docx is not installed.
    """
    yield 1, {"text": _read_docx(path) if path.suffix.lower() == _DOCX else read_text(path)}


def _read_docx(path: Path) -> str:
    """Return the text of a Word file: one line per paragraph and per table row, with tabs between the cells."""
    try:
        from docx import Document
        from docx.opc.exceptions import OpcError
        from docx.table import Table
    except ImportError:
        raise MachineError(f"{path}: Word files need python-docx; {install_command('docx')}") from None
    try:
        parts = list(Document(str(path)).iter_inner_content())
    except (OpcError, OSError, KeyError, ValueError) as error:
        raise RequestError(f"{path}: not a Word file: {error}") from None
    return "\n".join(_format_table(part) if isinstance(part, Table) else part.text for part in parts)


def _format_table(table: Table) -> str:
    return "\n".join("\t".join(cell.text for cell in row.cells) for row in table.rows)


COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".parquet", ".arrow")
_MAGIC = b"PAR1"
_PIECE = 2**20
LONGEST_LINE = 256 * 2**20  # bytes; a line is read into memory as a whole


def parse_suffix(file: Path) -> str:
    """Return the suffix of the file format, in lower case: ``.jsonl`` for ``rows.jsonl.gz``."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


@contextmanager
def open_decompressed(file: Path) -> Iterator[IO[bytes]]:
    """Open a file as bytes, decompressed if its name says that it is compressed.

    Raises:
        RequestError: the file cannot be opened, has a different format than its name says, or is truncated.
    """
    try:
        with _open(file) as stream:
            yield stream
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        # RequestErrors raised inside the with block pass unchanged.
        raise RequestError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def iterate_numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line number from 1, line)`` without a byte order mark; raise RequestError as ``open_decompressed``."""
    with open_decompressed(file) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise RequestError(
                    f"{file}:{number}: a line of more than {LONGEST_LINE // 2**20} MiB; split the row into several"
                )
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def read_all(file: Path) -> bytes:
    """Return all bytes of a file, decompressed; raise RequestError as ``open_decompressed``."""
    with open_decompressed(file) as stream:
        return stream.read()


def explain_unreadable(file: Path) -> str | None:
    """Return why a file cannot be read, such as ``is empty``, or None if it can."""
    try:
        stat = file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return _explain_unreadable(str(file), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=2**16)
def _explain_unreadable(name: str, size: int, _: int) -> str | None:
    file = Path(name)
    if not size:
        return "is empty"
    if not os.access(file, os.R_OK):
        return "cannot be read: permission denied"
    try:
        if parse_suffix(file) == ".parquet":
            return None if _has_magic(file, size) else "is not a complete Parquet file"
        if parse_suffix(file) == ".arrow":
            return None
        if parse_suffix(file) == ".docx":
            return None if zipfile.is_zipfile(file) else "is not a Word file"
        return _explain_not_text(file)
    except RequestError as error:
        return str(error).removeprefix(f"{file}: ")


def _has_magic(file: Path, size: int) -> bool:
    with file.open("rb") as stream:
        begin = stream.read(len(_MAGIC))
        stream.seek(max(0, size - len(_MAGIC)))
        return begin == stream.read() == _MAGIC


def _explain_not_text(file: Path) -> str | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, blank = 1, True
    with open_decompressed(file) as stream:
        while True:
            raw = stream.read(_PIECE)
            try:
                decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line += raw.count(b"\n", 0, error.start)
                return f"is not UTF-8 text (line {line})"
            if b"\0" in raw:
                line += raw.count(b"\n", 0, raw.index(0))
                return f"is not text: it has a zero byte (line {line})"
            blank = blank and not raw.removeprefix(codecs.BOM_UTF8).strip()
            if not raw:
                return "is empty" if blank else None
            line += raw.count(b"\n")


def _open(file: Path) -> Any:
    match file.suffix.lower():
        case ".gz":
            return gzip.open(file, "rb")
        case ".bz2":
            return bz2.open(file, "rb")
        case ".xz":
            return lzma.open(file, "rb")
        case ".zst":
            import pyarrow as pa

            return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(file)), "zstd"))
    return file.open("rb")
