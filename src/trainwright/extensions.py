"""Registries of what a recipe can name: what is built in, what installed packages add, and ``module:Name``.

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
    """Objects of one kind by name, each imported when it is first asked for.

    Args:
        group: the group of entry points that adds to it, such as ``trainwright.tasks``.
        builtin: the names of the package's own objects, each with its place ``module:Name``.
        kind: what one of them is called in messages, such as ``task``.
        required: attributes that each must have.
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
        """Return the index of ``name`` in ``names()``; of a place ``module:Name`` that of the end."""
        names = self.names()
        return names.index(name) if name in names else len(names)

    def get(self, name: str) -> T:
        """Return the object of that name, or at that place ``module:Name``.

        Raises:
            RequestError: there is none of that name, it is registered twice, cannot be imported, or lacks what is
                required.
        """
        if name not in self._found:
            entry = self._entry(name)
            found = load(entry.place, entry.described) if entry.place != self._builtin.get(name) else _at(entry.place)
            self._check(found, entry)
            self._found[name] = found
        return self._found[name]

    def find(self, name: str) -> T | None:
        """As ``get``; None where ``name`` is not registered, and no place in a module that is there."""
        if name not in self.names() and not _is_place(name):
            return None
        return self.get(name)

    def is_built_in(self, name: str) -> bool:
        """Whether the package itself has it."""
        return name in self._builtin

    def check(self, name: str) -> None:
        """Import ``name`` unless it is built in. Raises RequestError as ``get``."""
        if name not in self._builtin:
            self.get(name)

    def package(self, name: str) -> str | None:
        """Return the name of the installed package that registered ``name``; None where none did."""
        return self._entry(name).package

    def describe(self, name: str) -> str:
        """``name`` in messages, with the package and the entry point that registered it."""
        return self._entry(name).described

    def _entry(self, name: str) -> _Entry:
        if name in self._builtin:
            self._registered()  # refuses a second object of that name
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
        return f"{names} give module:Name"

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
                raise RequestError(f"{described} has a colon in its name, which means a place; rename it")
            entries[point.name] = _Entry(point.value, described, package)
        return entries

    def _check(self, found: Any, entry: _Entry) -> None:
        if missing := [attribute for attribute in self.required if not hasattr(found, attribute)]:
            raise RequestError(f"{entry.described} lacks {', '.join(missing)}")


def load(place: str, described: str) -> Any:
    """Return what stands at ``place``, ``package.module:Name``; ``described`` names who asks for it in messages.

    Modules in the directory that the command runs in are found, as ``python -m`` finds them.

    Raises:
        RequestError: it is not written so, or cannot be imported.
    """
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute):
        raise RequestError(f"{described}: should be package.module:Name")
    _look_in_working_directory()
    try:
        return _at(place)
    except Exception as error:  # whatever the module does when it is imported
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
    # `python -m` looks there, and a console script does not.
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

    As ``importlib.metadata.entry_points``, which takes ten times as long: it parses those of all packages.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for distribution in distributions():
        if "trainwright." in (distribution.read_text("entry_points.txt") or ""):
            found.setdefault(distribution.name, tuple(distribution.entry_points))  # the first on the path counts
    return tuple(point for points in found.values() for point in points)


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "of unknown name"
