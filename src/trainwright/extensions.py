"""Registries of what recipes can name: built-in objects, those of installed packages, and ``module:Name``.

A package adds to a registry by an entry point of its group, for instance in its ``pyproject.toml``::

    [project.entry-points."trainwright.tasks"]
    reverse = "my_package.reverse:SPEC"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from trainwright.errors import RequestError

T = TypeVar("T")


class _Entry(NamedTuple):
    place: str  # module:Name
    described: str  # for messages
    package: str | None  # None: built in, or named by the recipe itself


class Registry(Generic[T]):
    """Objects of one kind by name, each imported on first use.

    Args:
        group: the group of entry points that adds to it, such as ``trainwright.tasks``.
        builtin: the names of the package's own objects, each with its place ``module:Name``.
        kind: the kind's name in messages, such as ``task``.
        required: attributes that each object must have.
    """

    def __init__(self, group: str, builtin: Mapping[str, str], kind: str, required: tuple[str, ...] = ()) -> None:
        self.group, self.kind, self.required, self._builtin = group, kind, required, dict(builtin)
        self._found: dict[str, T] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names that are built in or registered, built-in ones first.

        Raises:
            RequestError: a name is registered twice.
        """
        return (*self._builtin, *sorted(self._registered()))

    def order(self, name: str) -> int:
        """Return the index of ``name`` in ``names()``; a place ``module:Name`` comes last."""
        names = self.names()
        return names.index(name) if name in names else len(names)

    def get(self, name: str) -> T:
        """Return the object of that name, or at that place ``module:Name``.

        Raises:
            RequestError: the name is unknown or registered twice, or the object cannot be imported, or lacks a required
                attribute.
        """
        if name not in self._found:
            entry = self._entry(name)
            found = load(entry.place, entry.described) if entry.place != self._builtin.get(name) else _at(entry.place)
            self._check(found, entry)
            self._found[name] = found
        return self._found[name]

    def find(self, name: str) -> T | None:
        """Return the object like ``get``; None if ``name`` is not registered and not a place in an existing module."""
        if name not in self.names() and not _is_place(name):
            return None
        return self.get(name)

    def is_built_in(self, name: str) -> bool:
        """Return whether the object is built in."""
        return name in self._builtin

    def check(self, name: str) -> None:
        """Import ``name`` unless it is built in. Raises RequestError like ``get``."""
        if name not in self._builtin:
            self.get(name)

    def package(self, name: str) -> str | None:
        """Return the name of the installed package that registered ``name``; None if none did."""
        return self._entry(name).package

    def describe(self, name: str) -> str:
        """Return ``name`` for messages, with the package and the entry point that registered it."""
        return self._entry(name).described

    def _entry(self, name: str) -> _Entry:
        if name in self._builtin:
            self._registered()  # raises if the name is registered twice
            return _Entry(self._builtin[name], f"{self.kind} {name}", None)
        if ":" in name:
            return _Entry(name, f"{self.kind} {name}", None)
        registered = self._registered()
        if name not in registered:
            raise RequestError(f"unknown {self.kind} {name!r}; {self._suggestion(name)}")
        return registered[name]

    def _suggestion(self, name: str) -> str:
        near = get_close_matches(name, self.names(), 1)
        if near:
            return f"did you mean {near[0]}?"
        names = f"choose from {', '.join(self.names())}, or" if self.names() else "none is installed;"
        return f"{names} use module:Name"

    def _registered(self) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for point in _entry_points(self.group):
            package = _package_of(point)
            described = f"package {package}: {self.kind} {point.name} (entry point {point.value} of {self.group})"
            owner = "trainwright itself" if point.name in self._builtin else None
            if point.name in entries:
                owner = f"package {entries[point.name].package}"
            if owner is not None:
                raise RequestError(f"{described} is also registered by {owner}; uninstall or rename one of the two")
            if ":" in point.name:
                raise RequestError(f"{described} has a colon in its name; rename it")
            entries[point.name] = _Entry(point.value, described, package)
        return entries

    def _check(self, found: Any, entry: _Entry) -> None:
        if missing := [attribute for attribute in self.required if not hasattr(found, attribute)]:
            raise RequestError(f"{entry.described} lacks {', '.join(missing)}")


def load(place: str, described: str) -> Any:
    """Return the object at ``place``, ``package.module:Name``; ``described`` is its origin in messages.

    Modules in the working directory are found, as with ``python -m``.

    Raises:
        RequestError: the place is malformed, or cannot be imported.
    """
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute):
        raise RequestError(f"{described}: expected package.module:Name")
    _look_in_working_directory()
    try:
        return _at(place)
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise RequestError(f"{described} cannot be imported: {kind}{error}") from error


def _is_place(name: str) -> bool:
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        return False
    _look_in_working_directory()
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _look_in_working_directory() -> None:
    # `python -m` searches it, but a console script does not.
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())


def _at(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return attrgetter(attribute)(import_module(module))


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(point for point in _all_entry_points() if point.group == group)


@cache
def _all_entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of Trainwright's groups.

    ``importlib.metadata.entry_points`` takes ten times as long, because it parses those of all packages.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for distribution in distributions():
        if "trainwright." in (distribution.read_text("entry_points.txt") or ""):
            found.setdefault(distribution.name, tuple(distribution.entry_points))  # the first on the path counts
    return tuple(point for points in found.values() for point in points)


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "of unknown name"
