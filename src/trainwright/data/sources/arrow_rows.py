"""Convert rows to one Arrow table: compact, one type per column, and on disk if it is large."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.data.sources.row_files import CONTENTS, MESSAGES_NAMES, Row, kind_of, leaves, text_of
from trainwright.errors import RequestError

if TYPE_CHECKING:
    import pyarrow as pa

PlacedRow: TypeAlias = tuple[Path, int, Row]  # (file, line, row)

_TURN_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", *MESSAGES_NAMES)  # with lists of turns
_CHUNK_ROWS = 2000
_CHUNK_CHARACTERS = 8 * 2**20
_SPILL_BYTES = 64 * 2**20  # kept in memory before it is written to a memory-mapped file


def table_of_rows(read: Callable[[], Iterator[PlacedRow]]) -> pa.Table:
    """Return one table of all rows; each call of ``read`` yields the rows from the start.

    Raises:
        RequestError: a column's values have different types; the message names both lines.
    """
    import pyarrow as pa

    def chunks() -> Iterator[pa.Table]:
        rows = read()
        while chunk := _chunk(rows):
            columns = dict.fromkeys(key for _, _, row in chunk for key in row)
            yield pa.table({key: pa.array([row.get(key) for _, _, row in chunk]) for key in columns})

    try:
        return join_tables(chunks())
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise _explain(read(), error) from None


def _chunk(rows: Iterator[PlacedRow]) -> list[PlacedRow]:
    """Return the next rows, fewer if their texts are long."""
    chunk: list[PlacedRow] = []
    characters = 0
    for placed in islice(rows, _CHUNK_ROWS):
        chunk.append(placed)
        characters += sum(len(value) for value in placed[2].values() if isinstance(value, str))
        if characters > _CHUNK_CHARACTERS:
            break
    return chunk


def join_tables(tables: Iterable[pa.Table]) -> pa.Table:
    """Concatenate tables with the union of their columns; data over 64 MiB goes to unnamed memory-mapped files."""
    import pyarrow as pa

    joined: list[pa.Table] = []
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(part.nbytes for part in held) > _SPILL_BYTES:
            joined.append(_spill(pa.concat_tables(held, promote_options="permissive")))
            held = []
    return pa.concat_tables(joined + held, promote_options="permissive")


def _spill(table: pa.Table) -> pa.Table:
    """Return the same table memory-mapped from a deleted file, whose space is freed with its last reader."""
    import pyarrow as pa

    handle, name = tempfile.mkstemp(prefix="trainwright-rows-")
    os.close(handle)
    try:
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return pa.ipc.open_file(pa.memory_map(name)).read_all()
    finally:
        os.unlink(name)


def _explain(rows: Iterator[PlacedRow], error: Exception) -> RequestError:
    """Return an error about the first two values whose types differ."""
    seen: dict[str, tuple[str, str]] = {}
    last: Path | None = None
    for path, line, row in rows:
        last = path
        for field, value in leaves("", row):
            here = f"{path}:{line}"
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                return RequestError(f"{here}: {field} is a number of more than 64 bits; write it as text")
            kind, place = seen.setdefault(field, (kind_of(value), here))
            if kind != kind_of(value):
                return RequestError(
                    f"{here}: {field} is {kind_of(value)} here and {kind} at {place}; use one type in all rows"
                )
    return RequestError(f"{last}: the rows do not fit one table: {error}")


def with_text_content(row: Row) -> Row:
    """Join lists of text parts and serialize tools in a row, so that columns have one type."""
    turns = [field for field in _TURN_COLUMNS if isinstance(row.get(field), list)]
    if isinstance(row.get("tools"), list):
        row = {**row, "tools": _as_text(row["tools"])}
    return {**row, **{field: [_joined(turn) for turn in row[field]] for field in turns}} if turns else row


def _joined(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    if isinstance(turn.get("tool_calls"), list):
        turn = {**turn, "tool_calls": _as_text(turn["tool_calls"])}
    lists = {key: text_of(turn[key]) for key in CONTENTS if isinstance(turn.get(key), list)}
    return {**turn, **{key: text for key, text in lists.items() if text is not None}} if lists else turn


def _as_text(value: Any) -> Any:
    """Return a list as JSON text, and any other value unchanged."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
