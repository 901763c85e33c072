"""Open and read files, decompressed, tell their formats by name, and find files that cannot be read."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from trainwright.errors import RequestError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".parquet", ".arrow")
_MAGIC = b"PAR1"
_PIECE = 2**20
LONGEST_LINE = 256 * 2**20  # bytes; a line is read into memory as a whole


def suffix_of(file: Path) -> str:
    """Return the suffix of the file format, in lower case: ``.jsonl`` for ``rows.jsonl.gz``."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


@contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
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


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield ``(line number from 1, line)`` without a byte order mark; raise RequestError as ``opened``."""
    with opened(file) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise RequestError(
                    f"{file}:{number}: a line of more than {LONGEST_LINE // 2**20} MiB; split the row into several"
                )
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def read_all(file: Path) -> bytes:
    """Return all bytes of a file, decompressed; raise RequestError as ``opened``."""
    with opened(file) as stream:
        return stream.read()


def why_unreadable(file: Path) -> str | None:
    """Return why a file cannot be read, such as ``is empty``, or None if it can."""
    try:
        stat = file.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return _why_unreadable(str(file), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=2**16)
def _why_unreadable(name: str, size: int, _: int) -> str | None:
    file = Path(name)
    if not size:
        return "is empty"
    if not os.access(file, os.R_OK):
        return "cannot be read: permission denied"
    try:
        if suffix_of(file) == ".parquet":
            return None if _has_magic(file, size) else "is not a complete Parquet file"
        if suffix_of(file) == ".arrow":
            return None
        if suffix_of(file) == ".docx":
            return None if zipfile.is_zipfile(file) else "is not a Word file"
        return _why_no_text(file)
    except RequestError as error:
        return str(error).removeprefix(f"{file}: ")


def _has_magic(file: Path, size: int) -> bool:
    with file.open("rb") as stream:
        begin = stream.read(len(_MAGIC))
        stream.seek(max(0, size - len(_MAGIC)))
        return begin == stream.read() == _MAGIC


def _why_no_text(file: Path) -> str | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, blank = 1, True
    with opened(file) as stream:
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
