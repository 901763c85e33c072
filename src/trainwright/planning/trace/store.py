"""Traces as JSON: those of well-known models are shipped, others are kept in Trainwright's cache. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from trainwright.machine.cache import find_cache_root, try_write
from trainwright.planning.trace.units import (
    LayerAttention,
    ModelFacts,
    ModelTrace,
    Moment,
    Operation,
    PassTrace,
    Size,
    TracedParameter,
    UnitTrace,
)

# The product's own code that a trace runs, in this package.
_CODE = (
    "planning/trace",
    "models",
    "tasks/unlearn",
    "data/stream",
    "parallel/constants.py",
    "recipe/sections/model.py",
)
SHIPPED = Path(__file__).with_name("traces.zip")
_FORMAT = 2
_VERSIONS = "versions.json"  # in the archive: those of the libraries that were traced
_TABLES = "tables"  # in the archive: those of all traces of a model, most of whose parts are alike


def hash_key(what: Any) -> str:
    """Return the name of a stored value that depends on ``what``."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


@cache
def read_versions() -> dict[str, str]:
    """Return the versions of what is traced: of the libraries that are installed, as PEFT need not be."""
    libraries = {}
    for name in ("torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return {"format": str(_FORMAT), **libraries}


@cache
def _hash_code() -> str:
    """Return a hash of the code that a trace runs: another version of it makes other traces."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in (root / name for name in _CODE):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def read_value(key: str, configuration: str = "") -> Any:
    """Return a stored value; None if there is none. ``configuration``: of the model that it is of."""
    name = name_model(configuration)
    if name in (_list_archived() or ()) and key in (traces := _read_archived_model(name)):
        return traces[key]
    try:
        return json.loads(_locate_trace(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_value(key: str, value: Any) -> None:
    """Keep a value in the cache, if it can be written."""
    try_write(_locate_trace(key), json.dumps(value, separators=(",", ":")))


def write_archive(file: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Write an archive of traces, as ``as_json`` gives them, by the name of their model."""
    new_file = file.with_suffix(".new")  # others may read the archive
    with ZipFile(new_file, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(_VERSIONS, json.dumps(read_versions()))
        for name, of_model in models.items():
            tables = _Tables()
            values = {key: _convert_trace(from_json(trace), tables) for key, trace in of_model.items()}
            values[_TABLES] = tables.as_json()
            archive.writestr(name, json.dumps(values, separators=(",", ":")))
    new_file.replace(file)
    for cached_function in (_open_archive, _list_archived, _read_archived_model):
        cached_function.cache_clear()


def read_archive() -> dict[str, dict[str, Any]]:
    """Return the traces in the archive as ``write_archive`` takes them, if they are of these versions of the
    libraries.
    """
    return {name: dict(_read_archived_model(name)) for name in _list_archived() or () if name != _VERSIONS}


def name_model(configuration: str) -> str:
    """Return the name of a model in the archive."""
    return hash_key(["model", configuration])


@lru_cache(maxsize=8)
def _read_archived_model(name: str) -> Mapping[str, Any]:
    values: dict[str, Any] = json.loads(_open_archive().read(name))
    tables = values.pop(_TABLES)
    return {key: value | tables for key, value in values.items()}


def _locate_trace(key: str) -> Path:
    return find_cache_root() / "traces" / f"{hash_key([key, read_versions(), _hash_code()])}.json"


@cache
def _open_archive() -> ZipFile:
    return ZipFile(SHIPPED)


@cache
def _list_archived() -> frozenset[str] | None:
    """Return the names in the shipped archive; None if it is of other versions of the libraries."""
    if not SHIPPED.is_file():
        return None
    if not read_versions().items() <= json.loads(_open_archive().read(_VERSIONS)).items():
        return None
    return frozenset(_open_archive().namelist())


class _Tables:
    """What occurs often in traces, by its number: sizes, operations, passes and lists of parameters."""

    def __init__(self) -> None:
        self.sizes: dict[Size, int] = {}
        self.operations: dict[Any, int] = {}
        self.parts: dict[Any, int] = {}

    def size(self, size: Size) -> int:
        return self.sizes.setdefault(tuple(size), len(self.sizes))

    def part(self, part: PassTrace[Size]) -> int:
        moments = tuple((m.gradient, tuple(map(self.size, m.live)), self.size(m.after)) for m in part.moments)
        keys = ((o.kind, o.name, *map(self.size, o[2:10]), o.width, o.generation) for o in part.operations)
        operations = tuple(self.operations.setdefault(key, len(self.operations)) for key in keys)
        saved_sizes = tuple(map(self.size, part.saved))
        return self.parts.setdefault((moments, operations, saved_sizes), len(self.parts))

    def as_json(self) -> dict[str, Any]:
        return {name: [*getattr(self, name)] for name in ("sizes", "operations", "parts")}


def to_json(trace: ModelTrace[Size]) -> dict[str, Any]:
    """Return a trace as plain values."""
    tables = _Tables()
    return _convert_trace(trace, tables) | tables.as_json()


def _convert_trace(trace: ModelTrace[Size], tables: _Tables) -> dict[str, Any]:
    units = [
        [tables.parts.setdefault(unit.parameters, len(tables.parts)), *map(tables.part, unit[1:])]
        for unit in trace.units
    ]
    defaults = {f.name: f.default for f in dataclasses.fields(trace.facts)}
    facts = {name: value for name, value in dataclasses.asdict(trace.facts).items() if value != defaults[name]}
    values = {"facts": facts, "units": units, "order": _encode_runs(trace.order)}
    return values | {"reference": _encode_runs(trace.reference), "copied": trace.reference_copied}


def from_json(values: Mapping[str, Any], generation: int = 2) -> ModelTrace[Size]:
    """Return the trace that ``as_json`` gave. ``generation``: of the flash attention that computes it."""
    sizes: list[Size] = [tuple(size) for size in values["sizes"]]

    @cache
    def operation(number: int) -> Operation[Size]:
        kind, name, *numbers = values["operations"][number]
        which = generation if kind == "attention" else 2
        return Operation._make((kind, name, *(sizes[i] for i in numbers[:8]), numbers[8], which))

    @cache
    def part(number: int) -> PassTrace[Size]:
        moments, numbers, saved_sizes = values["parts"][number]
        return PassTrace(
            tuple(Moment(name, tuple(sizes[i] for i in live), sizes[after]) for name, live, after in moments),
            tuple(map(operation, numbers)),
            tuple(sizes[i] for i in saved_sizes),
        )

    units = tuple(
        UnitTrace(
            tuple(TracedParameter(name, tuple(shape), *rest) for name, shape, *rest in values["parts"][parameters]),
            *map(part, passes),
        )
        for parameters, *passes in values["units"]
    )
    order, reference = (tuple(_decode_runs(values[name])) for name in ("order", "reference"))
    attention = tuple(LayerAttention(*layer) for layer in values["facts"].get("attention", ()))
    facts = ModelFacts(**{**values["facts"], "attention": attention})
    return ModelTrace(units, order, facts, reference, values["copied"])


def _encode_runs(numbers: Iterable[int]) -> list[list[int]]:
    return [[number, len([*run])] for number, run in groupby(numbers)]


def _decode_runs(runs: Iterable[list[int]]) -> Iterable[int]:
    return (number for number, count in runs for _ in range(count))
