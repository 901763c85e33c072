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
_FORMAT = 1
_VERSIONS = "versions.json"  # in the archive: those of the libraries that were traced


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
    archive, model = _shipped(), _name_of(configuration)
    if archive is not None and model in archive and key in (values := _of_model(model)):
        return values[key]
    try:
        return json.loads(_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(key: str, value: Any) -> None:
    """Keep a value in the cache, if it can be written."""
    try_write(_file(key), json.dumps(value, separators=(",", ":")))


def ship(file: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Write an archive of values by the configuration of their model: those of one are alike, and pack well."""
    with ZipFile(file, "w", ZIP_DEFLATED, compresslevel=9) as archive:
        values = {_name_of(configuration): of_model for configuration, of_model in models.items()}
        for name, value in {_VERSIONS: versions(), **values}.items():
            archive.writestr(name, json.dumps(value, separators=(",", ":")))
    for cached in (_opened, _shipped, _of_model):
        cached.cache_clear()


def shipped(configuration: str) -> dict[str, Any]:
    """Return the values of a model in the shipped archive, if it is of these versions of the libraries."""
    name = _name_of(configuration)
    return dict(_of_model(name)) if name in (_shipped() or ()) else {}


def _name_of(configuration: str) -> str:
    return key_of(["model", configuration])


@lru_cache(maxsize=8)
def _of_model(name: str) -> Mapping[str, Any]:
    values: dict[str, Any] = json.loads(_opened().read(name))
    return values


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


def as_json(trace: ModelTrace[Size]) -> dict[str, Any]:
    """Return a trace as plain values. Sizes and operations occur often, so they are numbers of a table."""
    sizes: dict[Size, int] = {}
    operations: dict[Any, int] = {}

    def number(size: Size) -> int:
        return sizes.setdefault(tuple(size), len(sizes))

    def pass_of(part: PassTrace[Size]) -> list[Any]:
        moments = [[m.gradient, [number(size) for size in m.live], number(m.after)] for m in part.moments]
        keys = [(o.kind, o.name, *(number(size) for size in o[2:10]), o.width, o.generation) for o in part.operations]
        return [moments, [operations.setdefault(key, len(operations)) for key in keys], [number(s) for s in part.saved]]

    units = [
        [[list(p) for p in unit.parameters], *map(pass_of, (unit.forward, unit.backward, unit.evaluation))]
        for unit in trace.units
    ]
    values: dict[str, Any] = {"facts": facts_as_json(trace.facts), "units": units, "order": _runs(trace.order)}
    values |= {"reference": _runs(trace.reference), "copied": trace.reference_copied}
    return {**values, "sizes": [list(size) for size in sizes], "operations": [list(key) for key in operations]}


def from_json(values: Mapping[str, Any], generation: int = 2) -> ModelTrace[Size]:
    """Return the trace that ``as_json`` gave. ``generation``: of the flash attention that computes it."""
    sizes: list[Size] = [tuple(size) for size in values["sizes"]]
    operations = []
    for kind, name, *numbers in values["operations"]:
        launches, m, n, k, times, flops, read, written = (sizes[i] for i in numbers[:8])
        which = generation if kind == "attention" else 2
        operations.append(Operation(kind, name, launches, m, n, k, times, flops, read, written, numbers[8], which))

    def pass_of(part: list[Any]) -> PassTrace[Size]:
        moments, numbers, saved = part
        return PassTrace(
            tuple(Moment(name, tuple(sizes[i] for i in live), sizes[after]) for name, live, after in moments),
            tuple(operations[i] for i in numbers),
            tuple(sizes[i] for i in saved),
        )

    units = tuple(
        UnitTrace(
            tuple(TracedParameter(name, tuple(shape), *rest) for name, shape, *rest in parameters),
            *(pass_of(forward), pass_of(backward), pass_of(evaluation)),
        )
        for parameters, forward, backward, evaluation in values["units"]
    )
    order, reference = (tuple(_unrolled(values[name])) for name in ("order", "reference"))
    return ModelTrace(units, order, facts_from_json(values["facts"]), reference, values["copied"])


def facts_as_json(facts: ModelFacts) -> dict[str, Any]:
    """Return the facts that differ from their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(facts)}
    return {name: value for name, value in dataclasses.asdict(facts).items() if value != defaults[name]}


def facts_from_json(values: Mapping[str, Any]) -> ModelFacts:
    """Return the facts that ``facts_as_json`` gave."""
    attention = tuple(LayerAttention(*layer) for layer in values.get("attention", ()))
    return ModelFacts(**{**values, "attention": attention})


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
