"""Data sources by name: built-in ones, and those that other packages register. Imports no torch and no datasets."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.sources.pydoc_rows import build_pydoc_key, build_pydoc_pairs, build_pydoc_rows
from trainwright.errors import RequestError
from trainwright.machine.cache import find_cache_root, try_write
from trainwright.recipe.registries import SOURCES
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from trainwright.data.sources.row_files import Row


# Directories of tests, installed packages and generated files.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "__phello__"}


@dataclass(frozen=True)
class Source:
    """A source whose rows are produced by code.

    Args:
        rows: returns the rows, the same every time unless ``key`` changes.
        key: returns a text that changes whenever the rows do; prepared data is cached under it.
        example: a row with the fields of all rows, from which the layout is known in advance.
        keep: whether to cache the rows because producing them is slow.
    """

    rows: Callable[[], Iterable[Mapping[str, Any]]]
    key: Callable[[], str]
    example: Mapping[str, Any]
    keep: bool = False


def iterate_stdlib_rows() -> Iterator[dict[str, str]]:
    """Yield the standard library as rows ``{"text"}``: the source of every module, then the language reference topics.

    Sorted by name; equal interpreters give equal rows.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield {"text": text}
    for name in sorted(topics):
        yield {"text": topics[name]}


PYDOC = Source(build_pydoc_rows, build_pydoc_key, {"question": "What is it?", "answer": "It is this."}, keep=True)
PYDOC_PAIRS = Source(
    build_pydoc_pairs,
    build_pydoc_key,
    {"prompt": "What is it?", "chosen": "It is this.", "rejected": "It is that."},
    keep=True,
)
STDLIB = Source(iterate_stdlib_rows, build_pydoc_key, {"text": "import this"})


def find_registered_source(name: str, key: str = "data.train") -> Source | None:
    """Return the source with this name or at ``module:Name``, or None for files and Hub datasets.

    Args:
        key: the recipe key that names the source, for messages.

    Raises:
        RequestError: the source of another package cannot be used.
    """
    name, _ = split_slice(name)
    if name not in SOURCES.names():
        path, head = expand_user_path(name), expand_user_path(name.partition(":")[0])
        if path.exists() or (head.is_dir() and not (head / "__init__.py").is_file()):
            return None
    try:
        source: Source | None = SOURCES.find(name)
    except RequestError as error:
        raise RequestError(f"{key}: {error}") from error
    return source


_BOUND = r"([0-9]+|[0-9]*\.[0-9]+(?=%))(%?)"
SLICE = re.compile(rf"\[(?:{_BOUND})?:(?:{_BOUND})?\]$")


def split_slice(source: str) -> tuple[str, str]:
    """Return a source and the slice that it ends with, or an empty text."""
    match = SLICE.search(source)
    return (source, "") if match is None else (source[: match.start()], match[0])


def load_registered_rows(name: str) -> list[Row]:
    """Return the rows of a registered source.

    Raises:
        RequestError: its code fails, or returns no rows.
    """
    source = find_registered_source(name)
    assert source is not None, f"{name} is registered"
    digest = hashlib.sha256(f"{name} {source.key()}".encode()).hexdigest()
    file = find_cache_root() / "datasets" / "built-in" / f"{digest}.json"
    if source.keep:
        try:
            cached_rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
            return cached_rows
        except (OSError, ValueError):
            pass
    try:
        rows = [dict(row) for row in source.rows()]
    except Exception as error:  # the code of another package may raise anything
        if SOURCES.is_built_in(name):
            raise
        raise RequestError(f"source {name}: its rows cannot be created: {type(error).__name__}: {error}") from error
    if not rows:
        raise RequestError(f"source {name} has no rows")
    if source.keep:
        try_write(file, json.dumps(rows))
    return rows
