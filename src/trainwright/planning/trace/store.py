"""Traces as JSON: those of well-known models are shipped, others are kept in Trainwright's cache. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from trainwright.machine.cache import cache_root, try_write
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


def key_of(what: Any) -> str:
    """Return the name of a stored value that depends on ``what``."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


@cache
def versions() -> dict[str, str]:
    """Return the versions of what is traced: of the libraries that are installed, as PEFT need not be."""
    libraries = {}
    for name in ("torch", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return {"format": str(_FORMAT), **libraries}


@cache
def _code() -> str:
    """Return a hash of the code that a trace runs: another version of it makes other traces."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in (root / name for name in _CODE):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def read(key: str, configuration: str = "") -> Any:
    """Return a stored value; None if there is none. ``configuration``: of the model that it is of."""
    name = name_of(configuration)
    if name in (_shipped() or ()) and key in (traces := _of_model(name)):
        return traces[key]
    try:
        return json.loads(_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(key: str, value: Any) -> None:
    """Keep a value in the cache, if it can be written."""
    try_write(_file(key), json.dumps(value, separators=(",", ":")))


def ship(file: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Write an archive of traces, as ``as_json`` gives them, by the name of their model."""
    written = file.with_suffix(".new")  # others may read the archive
    with ZipFile(written, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(_VERSIONS, json.dumps(versions()))
        for name, of_model in models.items():
            tables = _Tables()
            values = {key: _in_tables(from_json(trace), tables) for key, trace in of_model.items()}
            values[_TABLES] = tables.as_json()
            archive.writestr(name, json.dumps(values, separators=(",", ":")))
    written.replace(file)
    for cached in (_opened, _shipped, _of_model):
        cached.cache_clear()


def shipped() -> dict[str, dict[str, Any]]:
    """Return the traces in the archive as ``ship`` takes them, if they are of these versions of the libraries."""
    return {name: dict(_of_model(name)) for name in _shipped() or () if name != _VERSIONS}


def name_of(configuration: str) -> str:
    """Return the name of a model in the archive."""
    return key_of(["model", configuration])


@lru_cache(maxsize=8)
def _of_model(name: str) -> Mapping[str, Any]:
    values: dict[str, Any] = json.loads(_opened().read(name))
    tables = values.pop(_TABLES)
    return {key: value | tables for key, value in values.items()}


def _file(key: str) -> Path:
    return cache_root() / "traces" / f"{key_of([key, versions(), _code()])}.json"


@cache
def _opened() -> ZipFile:
    return ZipFile(SHIPPED)


@cache
def _shipped() -> frozenset[str] | None:
    """Return the names in the shipped archive; None if it is of other versions of the libraries."""
    if not SHIPPED.is_file():
        return None
    if not versions().items() <= json.loads(_opened().read(_VERSIONS)).items():
        return None
    return frozenset(_opened().namelist())


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
        saved = tuple(map(self.size, part.saved))
        return self.parts.setdefault((moments, operations, saved), len(self.parts))

    def as_json(self) -> dict[str, Any]:
        return {name: [*getattr(self, name)] for name in ("sizes", "operations", "parts")}


def as_json(trace: ModelTrace[Size]) -> dict[str, Any]:
    """Return a trace as plain values."""
    tables = _Tables()
    return _in_tables(trace, tables) | tables.as_json()


def _in_tables(trace: ModelTrace[Size], tables: _Tables) -> dict[str, Any]:
    units = [
        [tables.parts.setdefault(unit.parameters, len(tables.parts)), *map(tables.part, unit[1:])]
        for unit in trace.units
    ]
    defaults = {f.name: f.default for f in dataclasses.fields(trace.facts)}
    facts = {name: value for name, value in dataclasses.asdict(trace.facts).items() if value != defaults[name]}
    values = {"facts": facts, "units": units, "order": _runs(trace.order)}
    return values | {"reference": _runs(trace.reference), "copied": trace.reference_copied}


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
        moments, numbers, saved = values["parts"][number]
        return PassTrace(
            tuple(Moment(name, tuple(sizes[i] for i in live), sizes[after]) for name, live, after in moments),
            tuple(map(operation, numbers)),
            tuple(sizes[i] for i in saved),
        )

    units = tuple(
        UnitTrace(
            tuple(TracedParameter(name, tuple(shape), *rest) for name, shape, *rest in values["parts"][parameters]),
            *map(part, passes),
        )
        for parameters, *passes in values["units"]
    )
    order, reference = (tuple(_unrolled(values[name])) for name in ("order", "reference"))
    attention = tuple(LayerAttention(*layer) for layer in values["facts"].get("attention", ()))
    facts = ModelFacts(**{**values["facts"], "attention": attention})
    return ModelTrace(units, order, facts, reference, values["copied"])


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _unrolled(runs: Iterable[list[int]]) -> Iterable[int]:
    return (number for number, count in runs for _ in range(count))
