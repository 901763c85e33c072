"""Where rows come from: files, directories of files, the Hugging Face Hub, and what is built in.

rows.json   an array of objects or of texts, or an object holding one such list
rows.jsonl  an object a line (also .ndjson)
rows.csv    a header and text fields (.tsv: separated by tabs)
rows.parquet
text.txt    a row {"text"} a paragraph (also .md)
code.py     a row {"text"} a file (also .docx and other code); text as well where documents are asked for
directory/  all files of one of these kinds, in the order of their names; with none of rows in it, its documents
owner/name  a dataset of the Hub; owner/name:split, or owner/name:config:split
pydoc       the running interpreter's own documentation: questions and answers
pydoc-pairs the same with a right and a wrong answer to each question
stdlib      its standard library: the source of every module, and the language reference
openwebtext, wikitext, simple-wikipedia, tinystories, orca-math: of the Hub
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainwright.data import documents as whole_files
from trainwright.data.corpora import STDLIB, of_the_hub, stdlib_rows
from trainwright.data.formats import with_text_content
from trainwright.data.row_files import READERS, Row, iterate_rows
from trainwright.errors import RequestError
from trainwright.machine.cache import cache_root, keep

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from trainwright.data.arrow_rows import PlacedRow

PYDOC, PYDOC_PAIRS = "pydoc", "pydoc-pairs"
BUILT_IN = (PYDOC, PYDOC_PAIRS, STDLIB)
_PARQUET = ".parquet"
_SUFFIXES = (*READERS, _PARQUET)
_CHECKED_ROWS = 1000
_FEW = 256  # a row may be a book
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+\[\]%-]+){0,2}")
_SPLIT_NAMES = re.compile(r"(train|training|test|valid|validation|val|dev|eval)([-_.].*)?", re.IGNORECASE)


def read_rows(source: str, limit: int | None = None, key: str = "data.train", documents: bool = False) -> Dataset:
    """The rows of ``source``, at most the first ``limit`` of them; large ones are mapped from disk.

    Args:
        key: the recipe key that names the source, for messages.
        documents: a text file is one row, not one a paragraph, and a directory is all documents in and under it.

    Raises:
        RequestError: the source is missing, empty or not parseable, or a column's values differ in type.
    """
    _refuse_shards(source, key)
    if source in BUILT_IN:
        from datasets import Dataset

        return Dataset.from_list(built_in_rows(source)[:limit])
    files = source_files(source, key, documents)
    if files is None:
        return _hub_rows(source, limit, key)
    whole = is_documents(source, documents)
    table = _parquet_table(files, limit) if files[0].suffix.lower() == _PARQUET else _row_table(files, limit, whole)
    if not table.num_rows or not table.num_columns:
        raise RequestError(f"{key}: {source} holds no rows")
    return _dataset(table)


def iterate_source(
    source: str, limit: int | None = None, key: str = "data.train", documents: bool = False
) -> Iterator[tuple[str, Row]]:
    """``(place, row)`` of each row, at most of the first ``limit``; no more of the source is in memory at a time.

    A JSON file (.json), the Hub and pydoc are held whole. The place is the row's file and line, or its number from 1.

    Raises:
        RequestError: the source is missing, empty or not parseable.
    """
    _refuse_shards(source, key)
    files = None if source in BUILT_IN else source_files(source, key, documents)
    placed: Iterator[tuple[str, Row]]
    if files is None:
        placed = ((f"{source}: row {number}", dict(row)) for number, row in enumerate(read_rows(source, limit, key), 1))
    elif files[0].suffix.lower() == _PARQUET:
        placed = chain.from_iterable(map(_parquet_rows, files))
    else:
        placed = ((f"{file}:{line}", row) for file, line, row in _placed_rows(files, is_documents(source, documents)))
    return islice(placed, limit)


def built_in_rows(source: str) -> list[Row]:
    """The rows of one of the ``BUILT_IN`` data sets; kept in the cache, as collecting them takes a while."""
    from trainwright.data.pydoc_rows import pydoc_key, pydoc_pairs, pydoc_rows

    if source == STDLIB:
        return list(stdlib_rows())
    name = hashlib.sha256(f"{source} {pydoc_key()}".encode()).hexdigest()
    file = cache_root() / "datasets" / "built-in" / f"{name}.json"
    try:
        kept: list[Row] = json.loads(file.read_text(encoding="utf-8"))
        return kept
    except (OSError, ValueError):
        rows: list[Row] = list(pydoc_pairs() if source == PYDOC_PAIRS else pydoc_rows())
    keep(file, json.dumps(rows))
    return rows


def check_source(source: str, key: str = "data.train", documents: bool = False) -> list[Row]:
    """Look at a source without reading all of it; returns its first rows, or none for the Hub and what is built in.

    Every file must be there, not be empty, and parse over its first 1,000 rows. Imports no torch and no
    datasets.

    Raises:
        RequestError: as ``read_rows``.
    """
    _refuse_shards(source, key)
    files = None if source in BUILT_IN else source_files(source, key, documents)
    if files is None:
        return []
    first: list[Row] = []
    whole = is_documents(source, documents)
    for file in files[:8] if whole else files:
        if file.suffix.lower() == _PARQUET:
            rows = [row for table in _parquet_batches(file) for row in table.slice(0, 8).to_pylist()][:8]
        else:
            rows = [row for _, _, row in islice(_placed_rows([file], whole), _CHECKED_ROWS)]
        if not rows:
            raise RequestError(f"{key}: {file} holds no rows")
        first = (first + rows)[:8] if whole else first or rows[:8]
    return first


def place_of(source: str, index: int, documents: bool = False) -> str:
    """Where row ``index`` of ``read_rows(source)`` stands: its file and line, or the number of the row, from 1."""
    files = None if source in BUILT_IN else source_files(source, documents=documents)
    if files is None:
        return f"{source}: row {index + 1}"
    if files[0].suffix.lower() == _PARQUET:
        for file in files:
            count = sum(table.num_rows for table in _parquet_batches(file))
            if index < count:
                return f"{file}: row {index + 1}"
            index -= count
    for file, line, _ in islice(_placed_rows(files, is_documents(source, documents)), index, None):
        return f"{file}:{line}"
    return source  # it has become shorter since


def _refuse_shards(source: str, key: str) -> None:
    if Path(source).expanduser().is_dir():
        from trainwright.data.shards import is_shards

        if is_shards(source):
            raise RequestError(
                f"{key}: {source} holds token shards, which task pretrain alone reads; name rows or text"
            )


def is_documents(source: str, documents: bool = False) -> bool:
    """Whether each file of a local source is one row: because that is asked for, or as it could be nothing else."""
    path = Path(source).expanduser()
    if documents or path.suffix.lower() in whole_files.ALONE:
        return True
    return path.is_dir() and not _row_files(path) and bool(whole_files.document_files(path))


def source_files(source: str, key: str = "data.train", documents: bool = False) -> list[Path] | None:
    """The files of a local source in the order they are read; None if it names a dataset of the Hub."""
    path = Path(source).expanduser()
    if path.is_dir():
        whole = is_documents(source, documents)
        files = _documents_in(path, key) if whole else _directory_files(path, key)
    elif path.exists():
        files = [path]
    elif _is_hub_id(source):
        return None
    else:
        raise RequestError(f"{key}: {_missing(path)}")
    for file in files:
        if documents and file.suffix.lower() not in whole_files.SUFFIXES:
            raise RequestError(f"{key}: {file}: documents are text, Markdown, code and .docx files")
        if file.suffix.lower() not in _SUFFIXES and file.suffix.lower() not in whole_files.ALONE:
            raise RequestError(
                f"{key}: {file}: rows are read from {', '.join(_SUFFIXES)} files, and code and .docx whole"
            )
        if not file.stat().st_size:
            raise RequestError(f"{key}: {file} is empty")
        if not os.access(file, os.R_OK):
            raise RequestError(f"{key}: {file} cannot be read: permission denied")
    return files


def _documents_in(path: Path, key: str) -> list[Path]:
    if files := whole_files.document_files(path):
        return files
    raise RequestError(f"{key}: {path} holds no document: no text, Markdown, code or .docx file")


def _row_files(path: Path) -> list[Path]:
    """The files of rows in a directory; its README is none."""
    kinds = {suffix for suffix in _SUFFIXES if suffix != ".md"}
    files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if file.suffix.lower() in kinds)


def _directory_files(path: Path, key: str) -> list[Path]:
    files = _row_files(path)
    kinds = sorted({file.suffix.lower() for file in files})
    if not files:
        raise RequestError(f"{key}: {path} holds no {', '.join(_SUFFIXES)} file")
    if len(kinds) > 1:
        raise RequestError(f"{key}: {path} holds files of several kinds ({', '.join(kinds)}); name one file")
    # All of a directory is one data set. What is named as its test split must not slip into the training.
    splits = {match[1].lower() for file in files if (match := _SPLIT_NAMES.fullmatch(file.stem))}
    if len(splits) > 1:
        names = ", ".join(file.name for file in files)
        raise RequestError(f"{key}: {path} holds splits ({names}); name the file to use, as {files[-1]}")
    return files


def _is_hub_id(source: str) -> bool:
    if not _HUB_ID.fullmatch(source) or Path(source).suffix.lower() in _SUFFIXES:
        return False
    owner, slash, _ = source.partition("/")
    return owner not in (".", "..") and not (slash and Path(owner).is_dir())


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path}: there is no directory {path.parent}"
    near = difflib.get_close_matches(path.name, sorted(os.listdir(path.parent)), n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else f"; nothing in {path.parent} has a name like it"
    return f"no file {path}{meant}"


def _row_table(files: list[Path], limit: int | None, whole: bool) -> pa.Table:
    from trainwright.data.arrow_rows import table_of_rows

    def read() -> Iterator[PlacedRow]:
        return islice(_placed_rows(files, whole), limit)

    if next(read(), None) is None:
        raise RequestError(f"{', '.join(map(str, files))}: no rows in there")
    return table_of_rows(read)


def _placed_rows(files: list[Path], whole: bool) -> Iterator[PlacedRow]:
    read = whole_files.read_document if whole else iterate_rows
    return ((file, line, with_text_content(row)) for file in files for line, row in read(file))


def _parquet_batches(file: Path, rows: int = 8192) -> Iterator[pa.Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=rows):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{file}: not a Parquet file: {str(error).splitlines()[0]}") from None


def _parquet_rows(file: Path) -> Iterator[tuple[str, Row]]:
    rows = (row for table in _parquet_batches(file, _FEW) for row in table.to_pylist())
    return ((f"{file}: row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet_table(files: list[Path], limit: int | None) -> pa.Table:
    import pyarrow as pa

    from trainwright.data.arrow_rows import join_tables

    def tables() -> Iterator[pa.Table]:
        left = limit
        for table in chain.from_iterable(map(_parquet_batches, files)):
            yield table if left is None else table.slice(0, left)
            if left is not None and (left := left - table.num_rows) <= 0:
                return

    found = list(islice(chain.from_iterable(map(_parquet_batches, files)), 1))
    if not found:
        raise RequestError(f"{', '.join(map(str, files))}: no rows in there")
    try:
        return join_tables(tables())
    except pa.ArrowException as error:
        raise RequestError(f"{files[0].parent}: the files' columns differ in type: {error}") from None


def _dataset(table: pa.Table) -> Dataset:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # Without a fingerprint of its own, datasets would pickle the whole table to compute one.
    return Dataset(InMemoryTable(table), fingerprint=uuid.uuid4().hex[:16])


def _hub_rows(source: str, limit: int | None, key: str) -> Dataset:
    import datasets

    name, *parts = of_the_hub(source).split(":")
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) == 2 else None
    reachable = _hub_is_reachable(datasets.config.HF_ENDPOINT)
    try:
        with _offline(not reachable):
            rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # whatever the Hub, its server or the dataset's files raise
        if not reachable:
            fix = "the Hub cannot be reached from here and no copy is in the cache; give a local file instead"
            raise RequestError(f"{key}: {name}: no such file or directory, and {fix}") from None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RequestError(f"{key}: {source}: the dataset cannot be loaded from the Hub: {reason[0]}") from None
    if not len(rows):
        raise RequestError(f"{key}: {source} holds no rows")
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def _hub_is_reachable(endpoint: str) -> bool:
    """Whether it is worth asking: without a network the client retries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves and connects
    place = urlsplit(endpoint)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        with socket.create_connection((place.hostname, port), timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Let ``datasets`` look into its cache alone."""
    import datasets
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (datasets.config, constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = active or module.HF_HUB_OFFLINE
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
