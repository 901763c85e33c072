"""The output file of rows with answers: JSONL, a JSON array, or CSV, by its suffix."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError


def check_answer_file(out: Path) -> None:
    """Raise RequestError if ``out`` exists, or its format is not supported."""
    if out.suffix.lower() not in _WRITERS:
        raise RequestError(f"--out: {out} should end in {', '.join(_WRITERS)}")
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose another file")


def write_answers(out: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` to ``out`` in order, completely or not at all. Raises RequestError if it is not writable."""
    scratch = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8", newline="") as opened:
            _WRITERS[out.suffix.lower()](opened, rows)
            opened.flush()
            os.fsync(opened.fileno())
        scratch.replace(out)
    except OSError as error:
        raise RequestError(f"--out: {out} cannot be written: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _jsonl(opened: TextIO, rows: Sequence[Row]) -> None:
    opened.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _json(opened: TextIO, rows: Sequence[Row]) -> None:
    opened.write(json.dumps(rows, ensure_ascii=False, indent=2) + "\n")


def _csv(opened: TextIO, rows: Sequence[Row]) -> None:
    """Write one column per field of any row; lists and objects as JSON, because the format has only text."""
    writer = csv.DictWriter(opened, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_WRITERS: dict[str, Callable[[TextIO, Sequence[Row]], None]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
}
