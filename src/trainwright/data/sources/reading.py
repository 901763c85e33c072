"""Read rows from files, directories, the Hugging Face Hub and built-in sources.

rows.json   an array of objects or of texts, an object with one such list, or one object per line
rows.jsonl  one object per line (also .ndjson), or an array
rows.csv    a header and text fields (.tsv: separated by tabs)
rows.parquet, rows.arrow
text.txt    one row {"text"} per paragraph (also .md)
code.py     one row {"text"} per file (also .docx and other code; text files too if read as documents)
            (files may be compressed: .gz, .bz2, .xz, .zst)
directory/  all files of one of these kinds, sorted by name, or its documents if it has no row files;
            the output of save_to_disk of ``datasets``; a dataset repository; directory:split selects a split
            (local_files.py)
owner/name  a dataset of the Hub; owner/name:split, owner/name:config:split, or owner/name:data/rows.jsonl, a file of it
pydoc       the documentation of the running Python interpreter: questions and answers
pydoc-pairs the same with a correct and a wrong answer to each question
stdlib      the source of every standard library module, and the language reference
openwebtext, wikitext, simple-wikipedia, tinystories, orca-math: datasets of the Hub
others      sources that packages register as entry points ``trainwright.sources``; module:Name (registry.py)

Any of them may end with a slice of its rows, as in datasets: [:1000], [5000:], [10%:20%], [:0.5%].
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.data.sources import row_files as document_files
from trainwright.data.sources.hub import is_hub_id, load_hub_rows
from trainwright.data.sources.local_files import SourceFiles, describe_missing_source, find
from trainwright.data.sources.registry import SLICE, find_registered_source, load_registered_rows, split_slice
from trainwright.data.sources.row_files import (
    ANSWERS_NAMES,
    CONTENTS,
    MESSAGES_NAMES,
    TABLES,
    Row,
    describe_not_text,
    describe_type,
    explain_unreadable,
    iterate_leaves,
    iterate_rows,
    join_texts,
    parse_suffix,
)
from trainwright.errors import RequestError
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_clause

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

PlacedRow: TypeAlias = tuple[str, Row]  # (file and line, or file and row number; row)
# Returns the part of a row that is used, for the columns and the first rows of a source.
Narrowing: TypeAlias = Callable[[Sequence[str], Sequence[Row]], Callable[[Row], Row]]

_MEDIA = {"image": "images", "images": "images", "video": "videos", "videos": "videos", "audio": "sounds"}
_MEDIA["audios"] = "sounds"
_CHECKED_ROWS = 1000
_FEW = 256  # rows may be as long as a book
_FIRST = 8  # rows that determine the layout
_PARTS = tuple(f"[].{name}" for name in CONTENTS)
# Columns with lists of turns.
_TURN_COLUMNS = ("messages", "prompt", "completion", *MESSAGES_NAMES, *ANSWERS_NAMES)
_CHUNK_ROWS = 2000
_CHUNK_CHARACTERS = 8 * 2**20
_SPILL_BYTES = 64 * 2**20  # kept in memory before it is written to a memory-mapped file


def read_rows(
    source: str,
    limit: int | None = None,
    key: str = "data.train",
    documents: bool = False,
    narrowing: Narrowing | None = None,
) -> Dataset:
    """Return the rows of ``source``, at most the first ``limit``, as one Arrow table; large ones are memory-mapped.
    A source may end with a slice.

    In JSON rows, lists of text parts are joined and tools become JSON text, so that each column has one type.

    Args:
        key: the recipe key that names the source, for messages.
        documents: a text file is one row instead of one row per paragraph, and a directory is read with its
            subdirectories.
        narrowing: reduces the rows to what is used, if they do not fit one table otherwise; unused columns are then
            empty.

    Raises:
        RequestError: the source is missing, empty or not parseable, or the values of a column differ in type.
    """
    name, begin, end = _parse_bounds(source, limit, key, documents)
    if find_registered_source(name, key) is not None:
        from datasets import Dataset

        rows = Dataset.from_list(load_registered_rows(name)[begin:end])
        return _check_not_empty(rows, source, key)
    source_files = find_source_files(name, key, documents)
    if source_files is None:
        rows = load_hub_rows(name, key)
        stop = len(rows) if end is None else min(end, len(rows))
        return _check_not_empty(rows.select(range(min(begin, stop), stop)), source, key)
    files = list(source_files.usable())
    if not files:
        raise _build_unusable_error(source_files, key)
    if _are_tables(files) and all(map(_can_load_as_dataset, files)):
        table = _build_table(files, end, narrowing).slice(begin)
    else:
        table = build_table(lambda: islice(_iterate_placed_rows(files, source_files.documents), begin, end), narrowing)
    if not table.num_rows or not table.num_columns:
        raise RequestError(f"{key}: {source} has no rows")
    return _build_dataset(table)


def _check_not_empty(rows: Dataset, source: str, key: str) -> Dataset:
    if not len(rows):
        raise RequestError(f"{key}: {source} has no rows")
    return rows


def _parse_bounds(source: str, limit: int | None, key: str, documents: bool) -> tuple[str, int, int | None]:
    """Return a source without its slice, and the first row of the slice and the one after its last.

    Raises:
        RequestError: the slice ends before it begins.
    """
    name, text = split_slice(source)
    match = SLICE.match(text)
    if match is None:
        return name, 0, limit
    count = _count_rows(name, key, documents) if "%" in text else 0
    begin, end = (
        None if number is None else round(float(number) * count / 100) if percent else int(number)
        for number, percent in (match.group(1, 2), match.group(3, 4))
    )
    begin = begin or 0
    if end is not None and end < begin:
        raise RequestError(f"{key}: {source}: the slice ends before it begins")
    if limit is not None:
        end = begin + limit if end is None else min(end, begin + limit)
    return name, begin, end


def _count_rows(source: str, key: str, documents: bool) -> int:
    source_files = find_source_files(source, key, documents)
    if source_files is None:
        return len(read_rows(source, key=key))
    if _are_tables(source_files.files):
        return sum(table.num_rows for file in source_files.usable() for table in _iterate_batches(file))
    return sum(1 for _ in _iterate_placed_rows(source_files.usable(), source_files.documents))


def iterate_source(
    source: str, limit: int | None = None, key: str = "data.train", documents: bool = False, *, stream: bool = False
) -> Iterator[tuple[str, Row]]:
    """Yield ``(place, row)`` for the first ``limit`` rows or all, without reading the whole source into memory.

    JSON files (.json) and pydoc are read into memory as a whole. The place is the row's file and line, or its number
    from 1.

    Args:
        stream: read nothing twice: the rows of a Hub dataset are downloaded as they are read, not stored, and a file
            that cannot be read is an error instead of left out.

    Raises:
        RequestError: the source is missing, empty or not parseable.
    """
    if stream and "%" in split_slice(source)[1]:
        raise RequestError(f"{key}: {source}: the rows are not counted before they are read; slice it by row numbers")
    name, begin, end = _parse_bounds(source, limit, key, documents)
    source_files = find_source_files(name, key, documents)
    placed_rows: Iterator[tuple[str, Row]]
    if source_files is None:
        is_stream = stream and find_registered_source(name, key) is None
        rows = islice(load_hub_rows(name, key, stream=True), begin, end) if is_stream else read_rows(source, limit, key)
        return ((f"{name}: row {number}", dict(row)) for number, row in enumerate(rows, begin + 1))
    files = source_files.files if stream else source_files.usable()
    if _are_tables(source_files.files):
        placed_rows = chain.from_iterable(map(_iterate_table_rows, files))
    else:
        placed_rows = _iterate_placed_rows(files, source_files.documents)
    return islice(placed_rows, begin, end)


def check_source(source: str, key: str = "data.train", documents: bool = False) -> list[Row]:
    """Check a source without reading all of it; return its first rows, or an empty list for Hub and built-in sources.

    Every file must exist, not be empty, and parse over its first 1,000 rows. Does not import torch or datasets.

    Raises:
        RequestError: as in ``read_rows``.
    """
    source_files = find_source_files(source, key, documents)
    if source_files is None:
        return []
    first: list[Row] = []
    read = False
    for file in islice(source_files.usable(), 8) if source_files.documents else source_files.files:
        try:
            rows = _read_first_rows(file, source_files.documents)
        except RequestError:
            if len(source_files.files) == 1 or source_files.complete or explain_unreadable(file) is None:
                raise
            continue
        if not rows and len(source_files.files) == 1:
            raise RequestError(f"{key}: {file} has no rows")
        read = read or bool(rows)
        first = (first + rows)[:8] if source_files.documents else first or rows[:8]
    if not read:
        raise _build_unusable_error(source_files, key)
    return first


def locate_row(source: str, index: int, documents: bool = False, key: str = "data") -> str:
    """Return the place of row ``index`` of ``read_rows(source)``: its file and line, or the row number from 1."""
    name, begin, _ = _parse_bounds(source, None, key, documents)
    index += begin
    source_files = find_source_files(name, key, documents)
    if source_files is None:
        return f"{name}: row {index + 1}"
    if _are_tables(source_files.files):
        for file in source_files.usable():
            count = sum(table.num_rows for table in _iterate_batches(file))
            if index < count:
                return f"{file}: row {index + 1}"
            index -= count
    for location, _ in islice(_iterate_placed_rows(source_files.usable(), source_files.documents), index, None):
        return location
    return source  # the file has become shorter since


def list_source_notes(source: str, key: str = "data.train", documents: bool = False) -> list[str]:
    """Return messages about how a source was read: the chosen split and the files left out."""
    source_files = find_source_files(source, key, documents)
    return [] if source_files is None else [*source_files.notes, *source_files.left_out()]


def list_media_notes(rows: Dataset, columns: Sequence[str]) -> list[str]:
    """Return a line about each of the unused ``columns`` that has images, videos or sounds, without reading them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    notes = []
    for name in columns:
        if name.lower() not in _MEDIA:
            continue
        column = rows.data.column(name)
        lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        mask = pc.greater(pc.list_value_length(column), 0) if lists else pc.is_valid(column)
        if count := pc.sum(mask).as_py():
            media = _MEDIA[name.lower()]
            rows = format_clause(count, "row", f"have {media} in the column {name}")
            notes.append(f"{rows}: only text is trained on, and a text such as <image> stays in it")
    return notes


def find_source_files(source: str, key: str = "data.train", documents: bool = False) -> SourceFiles | None:
    """Return the files of a local source (of a file: itself), or None for registered sources and Hub datasets.

    Raises:
        RequestError: the file does not exist, or it holds neither rows nor documents.
    """
    source, part = split_slice(source)
    if find_registered_source(source, key) is not None:
        return None
    if expand_user_path(source).is_dir():
        from trainwright.data.sources.shards import is_shards  # imports numpy

        if is_shards(source):
            raise RequestError(f"{key}: {source} has token shards, which only task pretrain reads; use rows or text")
    source_files = find(source, key, documents)
    if source_files is None and not is_hub_id(source):
        raise RequestError(f"{key}: {describe_missing_source(source, part)}")
    return source_files


def _build_unusable_error(source_files: SourceFiles, key: str) -> RequestError:
    why = source_files.left_out() or [f"{file} has no rows" for file in source_files.files]
    return RequestError(f"{key}: no readable files: {'; '.join(why[:8])}")


def _are_tables(files: Sequence[Path]) -> bool:
    return parse_suffix(files[0]) in TABLES


def _read_first_rows(file: Path, documents: bool) -> list[Row]:
    if parse_suffix(file) in TABLES:
        return [row for table in islice(_iterate_batches(file, 8), 1) for row in _to_rows(file, table)]
    return [row for _, row in islice(_iterate_placed_rows([file], documents), _CHECKED_ROWS)]


def _iterate_placed_rows(files: Iterable[Path], documents: bool) -> Iterator[PlacedRow]:
    read = document_files.read_document if documents else iterate_rows
    for file in files:
        if parse_suffix(file) in TABLES:
            yield from _iterate_table_rows(file)
        else:
            yield from ((f"{file}:{line}", join_text_content(row)) for line, row in read(file))


def _iterate_batches(file: Path, rows: int = 8192) -> Iterator[pa.Table]:
    """Yield a table in parts of at most ``rows`` rows; Arrow files are memory-mapped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if parse_suffix(file) == ".arrow":
            table = _map_table(file)
            _check_names(file, table.column_names)
            yield from (table.slice(begin, rows) for begin in range(0, table.num_rows, rows))
            return
        with pq.ParquetFile(file) as parquet_file:
            _check_names(file, parquet_file.schema_arrow.names)
            for batch in parquet_file.iter_batches(batch_size=rows):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        kind = "an Arrow file" if parse_suffix(file) == ".arrow" else "a Parquet file"
        raise RequestError(f"{file}: not {kind}: {str(error).splitlines()[0]}") from None


def _check_names(file: Path, names: Sequence[str]) -> None:
    if twice := [name for at, name in enumerate(names) if name in names[:at]]:
        raise RequestError(f"{file}: has the column {twice[0]} more than once; rename one of them, or remove it")


def _map_table(file: Path) -> pa.Table:
    """Memory-map an Arrow file in stream format, which ``datasets`` writes, or in file format."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def _iterate_table_rows(file: Path) -> Iterator[tuple[str, Row]]:
    rows = (row for table in _iterate_batches(file, _FEW) for row in _to_rows(file, table))
    return ((f"{file}: row {number}", row) for number, row in enumerate(rows, start=1))


def _to_rows(file: Path, table: pa.Table) -> list[Row]:
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns[name] = _convert_values(column)
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            why = "a map has a key twice; keep one of them" if isinstance(error, KeyError) else error
            raise RequestError(f"{file}: the column {name} cannot be read: {why}") from None
    rows: list[Row] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    json_columns = [column.name for column in table.schema if _is_json(column.type)]
    for row in rows if json_columns else ():
        row.update(join_text_content({name: row[name] for name in json_columns}))
    return rows


def _convert_values(column: pa.ChunkedArray) -> list[Any]:
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    if _has_map(column.type):
        values = [_convert_keys_to_text(value) for value in values]
    return [_decode_json(value, column.type) for value in values] if _is_json(column.type) else values


def _has_map(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_map(kind) or any(_has_map(kind.field(index).type) for index in range(kind.num_fields))


def _convert_keys_to_text(value: Any) -> Any:
    """Return a value whose objects have text as keys, as JSON has; bytes are UTF-8."""
    if isinstance(value, list):
        return [_convert_keys_to_text(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key.decode() if isinstance(key, bytes) else str(key): _convert_keys_to_text(item) for key, item in value.items()
    }


def _can_load_as_dataset(file: Path) -> bool:
    """Return whether ``datasets`` has a type for each column of a table, as for maps it has none, and no column is JSON
    text, its type Json, which is decoded here.
    """
    from datasets import Features

    for table in islice(_iterate_batches(file, 1), 1):
        if any(_is_json(column.type) for column in table.schema):
            return False
        try:
            Features.from_arrow_schema(table.schema.remove_metadata())
        except (ValueError, TypeError):
            return False
    return True


def _is_json(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return True
    return any(_is_json(kind.field(index).type) for index in range(kind.num_fields))


def _decode_json(value: Any, kind: pa.DataType) -> Any:
    """Return a value with the JSON text in it decoded; in objects of the table, keys without a value are left out."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        values = {name: item for name, item in value.items() if item is not None}
        return {name: _decode_json(item, kind.field(name).type) for name, item in values.items()}
    if isinstance(value, list) and _is_json(kind):
        return [_decode_json(item, kind.value_type) for item in value]
    return value


def _build_table(files: Sequence[Path], limit: int | None, narrowing: Narrowing | None) -> pa.Table:
    import pyarrow as pa

    def tables() -> Iterator[pa.Table]:
        remaining = limit
        for table in chain.from_iterable(map(_iterate_batches, files)):
            yield table if remaining is None else table.slice(0, remaining)
            if remaining is not None and (remaining := remaining - table.num_rows) <= 0:
                return

    if next(tables(), None) is None:
        raise RequestError(f"{', '.join(map(str, files))}: no rows")
    mapped = all(parse_suffix(file) == ".arrow" for file in files)
    # Memory-mapped tables occupy no memory, so they are concatenated without a copy.
    join = functools.partial(pa.concat_tables, promote_options="permissive") if mapped else join_tables
    try:
        try:
            return join(tables())
        except pa.ArrowException:
            if narrowing is None:
                raise
            columns = list(dict.fromkeys(name for table in tables() for name in table.column_names))
            first = _to_rows(files[0], next(tables()).slice(0, _FIRST))
            used_names = narrowing(columns, first)(dict.fromkeys(columns, True)).keys()
            return join(_drop_values(table, [name for name in columns if name not in used_names]) for table in tables())
    except pa.ArrowException as error:
        raise RequestError(f"{files[0].parent}: the files' columns differ in type: {error}") from None


def _drop_values(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    import pyarrow as pa

    for name in columns:
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, pa.nulls(table.num_rows))
    return table


def _build_dataset(table: pa.Table) -> Dataset:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # Without a fingerprint, datasets would pickle the whole table to compute one. The schema metadata (images to
    # decode, label names) does not apply to raw values.
    return Dataset(InMemoryTable(table.replace_schema_metadata(None)), fingerprint=uuid.uuid4().hex[:16])


def build_table(read: Callable[[], Iterator[PlacedRow]], narrowing: Narrowing | None = None) -> pa.Table:
    """Return one table of all rows; each call of ``read`` yields the rows from the start.

    Args:
        narrowing: as in ``read_rows``.

    Raises:
        RequestError: a column's values have different types; the message names both lines.
    """
    import pyarrow as pa

    def chunks(rows: Iterator[PlacedRow]) -> Iterator[pa.Table]:
        while chunk := _read_chunk(rows):
            columns = dict.fromkeys(key for _, row in chunk for key in row)
            yield pa.table({key: pa.array([row.get(key) for _, row in chunk]) for key in columns})

    try:
        return join_tables(chunks(read()))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        if narrowing is None:
            raise _build_types_error(read(), error) from None
    columns = list(dict.fromkeys(key for _, row in read() for key in row))
    narrow = narrowing(columns, [row for _, row in islice(read(), _FIRST)])
    empty = dict.fromkeys(columns)

    def used() -> Iterator[PlacedRow]:
        return ((location, narrow(row)) for location, row in read())

    try:
        return join_tables(chunks((location, {**empty, **row}) for location, row in used()))
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise _build_types_error(used(), error) from None


def _read_chunk(rows: Iterator[PlacedRow]) -> list[PlacedRow]:
    """Return the next rows, fewer if their texts are long."""
    chunk: list[PlacedRow] = []
    characters = 0
    for placed_row in islice(rows, _CHUNK_ROWS):
        chunk.append(placed_row)
        characters += sum(len(value) for value in placed_row[1].values() if isinstance(value, str))
        if characters > _CHUNK_CHARACTERS:
            break
    return chunk


def join_tables(tables: Iterable[pa.Table]) -> pa.Table:
    """Concatenate tables with the union of their columns; data over 64 MiB goes to unnamed memory-mapped files."""
    import pyarrow as pa

    spilled_tables: list[pa.Table] = []
    in_memory: list[pa.Table] = []
    for table in tables:
        in_memory.append(table)
        if sum(part.nbytes for part in in_memory) > _SPILL_BYTES:
            spilled_tables.append(_spill_table(pa.concat_tables(in_memory, promote_options="permissive")))
            in_memory = []
    parts = spilled_tables + in_memory
    return pa.concat_tables(parts, promote_options="permissive") if parts else pa.table({})


def _spill_table(table: pa.Table) -> pa.Table:
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


def _build_types_error(rows: Iterator[PlacedRow], error: Exception) -> RequestError:
    """Return an error about the first two values whose types differ."""
    first_kinds: dict[str, tuple[str, str]] = {}
    origin = ""
    for origin, row in rows:
        for field, value in iterate_leaves("", row):
            if field.endswith(_PARTS) and isinstance(value, list) and (why := describe_not_text(value, named=True)):
                return RequestError(f"{origin}: {field} {why}")
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                return RequestError(f"{origin}: {field} is a number of more than 64 bits; write it as text")
            kind, location = first_kinds.setdefault(field, (describe_type(value), origin))
            if kind != describe_type(value):
                types = f"is {describe_type(value)} here and {kind} at {location}"
                return RequestError(f"{origin}: {field} {types}; use one type in all rows")
    return RequestError(f"{origin}: the rows do not fit one table: {error}")


def join_text_content(row: Row) -> Row:
    """Join lists of text parts and serialize tools in a row, so that columns have one type."""
    turns = [field for field in _TURN_COLUMNS if isinstance(row.get(field), list)]
    if tools := {name: _to_text(row[name]) for name in ("tools", "functions") if isinstance(row.get(name), list)}:
        row = {**row, **tools}
    return {**row, **{field: [_join_turn(turn) for turn in row[field]] for field in turns}} if turns else row


def _join_turn(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    if isinstance(turn.get("tool_calls"), list):
        turn = {**turn, "tool_calls": _to_text(turn["tool_calls"])}
    if isinstance(turn.get("function_call"), dict):
        turn = {**turn, "function_call": _to_text(turn["function_call"])}
    lists = {key: join_texts(turn[key]) for key in CONTENTS if isinstance(turn.get(key), list)}
    return {**turn, **{key: text for key, text in lists.items() if text is not None}} if lists else turn


def _to_text(value: Any) -> Any:
    """Return a list or an object as JSON text, and any other value unchanged."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
