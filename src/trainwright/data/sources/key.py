"""Keys of prepared data: from the paths of its sources, or from their content. Imports no torch."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.sources.reading import find_source_files
from trainwright.data.sources.registry import find_registered_source, split_slice
from trainwright.data.sources.row_files import parse_suffix
from trainwright.data.sources.shards import is_shards
from trainwright.recipe.sections.data import RowSettings
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from trainwright.recipe.sections.data import DataSection, SourceSection

_BLOCKS, _BLOCK = 64, 2**16
VERSION = 8  # raised when the code that determines the prepared data changes


def select_settings(data: DataSection, seed: int) -> dict[str, Any]:
    """Return the settings that determine the datasets. A separate validation source is identified by its content."""
    sources = [[source.format, source.limit, source.weight, *list_row_changes(source)] for source in data.sources]
    if len(sources) == 1:
        del sources[0][2]
    return {
        "version": VERSION,
        "format": data.format,
        "sources": sources if len(sources) > 1 else sources[0],
        **({} if data.mixing == "weights" else {"mixing": data.mixing}),
        **({} if data.stages is None else {"stages": True}),  # the summary names no shares of an epoch
        **({} if data.streaming is None else {"streaming": True}),  # the lengths are of the first rows
        **({"deduplicate": True} if data.deduplicate else {}),
        **({} if data.targets == "answers" else {"targets": data.targets}),
        "max_length": data.max_length,
        "long_documents": data.long_documents,
        "example_per_turn": data.example_per_turn,
        "accept_omissions": data.accept_omissions,
        "validation": _build_validation_settings(data),
        "seed": None if data.held_out is None else seed,
    }


def _build_validation_settings(data: DataSection) -> Any:
    if not isinstance(data.validation, dict):
        return "source" if isinstance(data.validation, str) else data.validation
    sources = {key: [source.format, source.limit, *list_row_changes(source)] for source, key in data.validation_sources}
    return [[name, sources.get(f"data.validation.{name}", rows)] for name, rows in data.validation.items()]


def list_row_changes(source: SourceSection) -> list[Any]:
    """Return how its rows are read, beside their format, if that is not the default."""
    changes = source.rows[1:]
    return [] if changes == RowSettings()[1:] else list(changes)


def build_source_key(data: DataSection, seed: int, identity: str) -> dict[str, Any]:
    """Return the key of prepared data, without reading the sources; ``identity`` is that of the tokenizer."""
    states = [read_file_states(source, key) for source, key in data.keyed_sources]
    return {**select_settings(data, seed), "sources of rows": states, "tokenizer": identity, "python": sys.version}


def read_file_states(source: SourceSection, key: str) -> Any:
    """Return the paths, sizes and times of a source's files, without reading them, and its slice."""
    name, part = split_slice(source.source)
    if (row_source := find_registered_source(name, key)) is not None:
        return [source.source, row_source.key()]
    if is_shards(name):
        files: Sequence[Path] = sorted(expand_user_path(name).iterdir())
    else:
        source_files = find_source_files(name, key, source.is_documents)
        if source_files is None:
            return ["hub", source.source]
        files = source_files.files
    stats = [(file.resolve(), file.stat()) for file in files]
    return [*([str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats), *filter(None, [part])]


def digest_content(source: SourceSection, key: str, *, sampled: bool = False) -> Any:
    """Return the digests of a source's content and its slice, independent of its paths.

    Args:
        sampled: of large files, read the size and blocks at even distances alone.
    """
    name, part = split_slice(source.source)
    if find_registered_source(name, key) is not None:
        return read_file_states(source, key)
    source_files = find_source_files(source.source, key, source.is_documents)
    if source_files is None:
        return ["hub", source.source]
    if sampled:
        parts = [[parse_suffix(file), file.stat().st_size, _digest_sample(file)] for file in source_files.files]
        return [*parts, *filter(None, [part])]
    digests = []
    for file in source_files.usable():
        with file.open("rb") as stream:
            digests.append([parse_suffix(file), hashlib.file_digest(stream, "sha256").hexdigest()])
    return [*digests, *filter(None, [part]), *source_files.left_out()]  # the summary names them


def _digest_sample(file: Path) -> str:
    """Return a digest of blocks of a file at even distances; of a file of up to 4 MiB, they are all of it."""
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as stream:
        for begin in (*(size * number // _BLOCKS for number in range(_BLOCKS)), max(0, size - _BLOCK)):
            stream.seek(begin)
            digest.update(stream.read(_BLOCK))
    return digest.hexdigest()
