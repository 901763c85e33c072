"""The output file of rows with answers: JSONL, a JSON array, or CSV, by its suffix."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.utils.paths import write_file


def check_answer_file(out: Path) -> None:
    """Raise RequestError if ``out`` exists, or its format is not supported."""
    if out.suffix.lower() not in _FORMATS:
        raise RequestError(f"--out: {out} should end in {', '.join(_FORMATS)}")
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose another file")


def write_answers(out: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` to ``out`` in order, completely or not at all. Raises RequestError if it is not writable."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, _FORMATS[out.suffix.lower()](rows))
    except OSError as error:
        raise RequestError(f"--out: {out} cannot be written: {error.strerror or error}") from error


def _jsonl(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _json(rows: Sequence[Row]) -> str:
    return json.dumps(rows, ensure_ascii=False, indent=2) + "\n"


def _csv(rows: Sequence[Row]) -> str:
    """Return one column per field of any row; lists and objects as JSON, because the format has only text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
}
