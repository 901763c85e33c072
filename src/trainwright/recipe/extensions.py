"""Registries of what recipes can name: built-in objects, those of installed packages, and ``module:Name``.

A package adds to a registry by an entry point of its group, for instance in its ``pyproject.toml``::

    [project.entry-points."trainwright.tasks"]
    reverse = "my_package.reverse:SPEC"

What a recipe itself names as ``module:Name`` is somebody's code; commands that only read do not import it.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, distributions
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

from trainwright.errors import RequestError
from trainwright.utils.paths import expand_user_path, is_working_directory

T = TypeVar("T")

# A variable, because worker processes inherit it. "0": nothing that a recipe names as module:Name is imported.
_TRUST = "TRAINWRIGHT_TRUST_CODE"
# The folders of recipes, in which modules are found after those of the working directory. A variable hands them to
# processes that are started; that of this one is not changed, as it may be a user's own.
_FOLDERS = "TRAINWRIGHT_MODULES"
_folders_of_recipes: list[str] = []
OWN = "file.py:Name or module:Name"  # how a recipe names somebody's code, in messages
_MARK = "__trainwright_extension__"


def extension(kind: str) -> Callable[[T], T]:
    """Mark a function or class as a ``kind``, ``"metric"`` or ``"observer"``, that recipes may name as
    ``module:Name``; without the mark a recipe could call any function of any module.

    >>> import trainwright as tw
    >>> @tw.extension("metric")
    ... def is_short(reference: str, answer: str) -> float:
    ...     return float(len(answer) <= len(reference))
    """

    def mark(marked: T) -> T:
        setattr(marked, _MARK, kind)
        return marked

    return mark


def search_beside(recipe: Path) -> None:
    """Have what recipes name as ``module:Name`` found in the folder of ``recipe`` too."""
    folder = os.path.abspath(recipe.parent)
    if folder not in (os.getcwd(), *_list_folders()):
        _folders_of_recipes.append(folder)


def build_child_environment() -> dict[str, str]:
    """Return the environment of a process to start that finds what recipes name as this one does."""
    return {**os.environ, _FOLDERS: os.pathsep.join(_list_folders())}


def find_user_modules(names: Iterable[str]) -> list[Path]:
    """Return the files, or folders of packages, of those ``module:Name`` that are in the working directory or beside a
    recipe, and not installed.
    """
    paths = set[Path]()
    for module in {_split(name)[0] for name in names if ":" in name}:
        file = _find_file(module if module.endswith(".py") else module.partition(".")[0])
        if file is not None and file.suffix == ".py":
            path = file.parent if file.name == "__init__.py" else file
            if str(path.parent.absolute()) in (os.getcwd(), *_list_folders()):
                paths.add(path)
    return sorted(paths)


@contextmanager
def set_trust(trusted: bool) -> Iterator[None]:
    """Allow, or refuse, to import what recipes name as ``module:Name``, in this process and those that it starts."""
    before = os.environ.get(_TRUST)
    os.environ[_TRUST] = str(int(trusted))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TRUST]
        else:
            os.environ[_TRUST] = before


class _Entry(NamedTuple):
    entry_point: str  # module:Name
    described: str  # for messages
    package: str | None  # None: built in, or named by the recipe itself


class Registry(Generic[T]):
    """Objects of one kind by name, each imported on first use.

    Args:
        group: the group of entry points that adds to it, such as ``trainwright.tasks``.
        builtin: the names of the package's own objects, each with its place ``module:Name``.
        kind: the kind's name in messages, such as ``task``.
        required: attributes that each object must have.
        marked: whether an object at a place must have the mark of ``extension``, as any function has the attributes.
    """

    def __init__(
        self, group: str, builtin: Mapping[str, str], kind: str, required: tuple[str, ...] = (), *, marked: bool = False
    ) -> None:
        self.group, self.kind, self.required, self._builtin = group, kind, required, dict(builtin)
        self._marked = marked
        self._loaded: dict[str, T] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names that are built in or registered, built-in ones first.

        Raises:
            RequestError: a name is registered twice.
        """
        return (*self._builtin, *sorted(self._list_registered()))

    def order(self, name: str) -> int:
        """Return the index of ``name`` in ``names()``; a place ``module:Name`` comes last."""
        names = self.names()
        return names.index(name) if name in names else len(names)

    def get(self, name: str) -> T:
        """Return the object of that name, or at that place ``module:Name``.

        Raises:
            RequestError: the name is unknown or registered twice, or the object cannot be imported, or lacks a required
                attribute or the mark; or it is at a place, and this command imports nothing that a recipe names.
        """
        if name not in self._loaded:
            entry = self._find_entry(name)
            if name in self._builtin:
                if not self.is_present(name):
                    raise RequestError(
                        f"{entry.described} needs {_split(entry.entry_point)[0]}, which is not installed"
                    )
                extension = _load_object(entry.entry_point)
            elif entry.package:
                extension = load(entry.entry_point, entry.described)
            else:
                extension = load_named(name, entry.described)
            self._check(extension, entry, named=":" in name)
            self._loaded[name] = extension
        return self._loaded[name]

    def present(self) -> list[T]:
        """Return the objects of all names that are present."""
        return [self.get(name) for name in self.names() if self.is_present(name)]

    def is_present(self, name: str) -> bool:
        """Return whether the object's module is there; that of a built-in one is not if its folder was deleted."""
        return name not in self._builtin or _is_there(self._builtin[name])

    def find(self, name: str) -> T | None:
        """Return the object like ``get``; None if ``name`` is not registered and not a place in an existing module."""
        if name not in self.names() and not _is_place(name):
            return None
        return self.get(name)

    def is_built_in(self, name: str) -> bool:
        """Return whether the object is built in."""
        return name in self._builtin

    def check(self, name: str) -> None:
        """Import ``name`` unless it is built in; where a command does not, look for it in its file.

        Raises RequestError like ``get``.
        """
        if ":" in name and not _is_trusted():
            self.look_for(name)
        elif name not in self._builtin:
            self.get(name)

    def look_for(self, name: str) -> None:
        """Raise RequestError if ``name`` is a place where there is certainly nothing. Imports nothing."""
        if ":" in name:
            _look_for(name, f"{self.kind} {name}")

    def check_origin(self, name: str) -> None:
        """Raise RequestError if ``name`` is a place in the standard library. Imports nothing."""
        if ":" in name:
            _refuse_library(name, f"{self.kind} {name}")

    def package(self, name: str) -> str | None:
        """Return the name of the installed package that registered ``name``; None if none did."""
        return self._find_entry(name).package

    def describe(self, name: str) -> str:
        """Return ``name`` for messages, with the package and the entry point that registered it."""
        return self._find_entry(name).described

    def _find_entry(self, name: str) -> _Entry:
        if name in self._builtin:
            self._list_registered()  # raises if the name is registered twice
            return _Entry(self._builtin[name], f"{self.kind} {name}", None)
        if ":" in name:
            return _Entry(name, f"{self.kind} {name}", None)
        entries = self._list_registered()
        if name not in entries:
            raise RequestError(f"unknown {self.kind} {name!r}; {self._suggest_name(name)}")
        return entries[name]

    def _suggest_name(self, name: str) -> str:
        near = get_close_matches(name, self.names(), 1)
        if near:
            return f"did you mean {near[0]}?"
        names = f"choose from {', '.join(self.names())}, or" if self.names() else "none is installed;"
        return f"{names} use {OWN}"

    def _list_registered(self) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for point in (point for point in _list_entry_points() if point.group == self.group):
            package = point.dist.name if point.dist is not None else "of unknown name"
            description = f"package {package}: {self.kind} {point.name} (entry point {point.value} of {self.group})"
            owner = "trainwright itself" if point.name in self._builtin else None
            if point.name in entries:
                owner = f"package {entries[point.name].package}"
            if owner is not None:
                raise RequestError(f"{description} is also registered by {owner}; uninstall or rename one of the two")
            if ":" in point.name:
                raise RequestError(f"{description} has a colon in its name; rename it")
            entries[point.name] = _Entry(point.value, description, package)
        return entries

    def _check(self, extension: Any, entry: _Entry, *, named: bool) -> None:
        if missing := [attribute for attribute in self.required if not hasattr(extension, attribute)]:
            raise RequestError(f"{entry.described} lacks {', '.join(missing)}")
        if self._marked and named and getattr(extension, _MARK, None) != self.kind:
            raise RequestError(
                f'{entry.described} is not marked as one; write @extension("{self.kind}") above its definition (from '
                f"trainwright import extension), or register it as an entry point of {self.group}"
            )


def check_named(entry_point: str, described: str) -> None:
    """Import what a recipe names, or look for it in its file where a command may not. Raises like ``load_named``."""
    if _is_trusted():
        load_named(entry_point, described)
    else:
        _look_for(entry_point, described)


def _is_trusted() -> bool:
    return os.environ.get(_TRUST) != "0"


def load_named(entry_point: str, described: str) -> Any:
    """Return like ``load`` what a recipe itself names; modules in the working directory and in the folder of the recipe
    are found, after all that are installed.

    Raises:
        RequestError: also if it is of the standard library, or this command imports nothing that a recipe names.
    """
    _refuse_library(entry_point, described)
    if not _is_trusted():
        raise RequestError(
            f"{described} is code that would run on this machine, and this command imports none that a recipe names; "
            "read it, then pass --trust-code"
        )
    # Last, so that nothing in them replaces what is installed; and only here, as optional modules of libraries that are
    # not installed would be found in them, too.
    sys.path += [folder for folder in dict.fromkeys((os.getcwd(), *_list_folders())) if folder not in sys.path]
    return load(entry_point, described)


def load(entry_point: str, described: str) -> Any:
    """Return the object at ``entry_point``, ``package.module:Name`` or ``file.py:Name``; ``described`` is its origin in
    messages.

    Raises:
        RequestError: the place is malformed, or cannot be imported.
    """
    if not all(_split(entry_point)):
        raise RequestError(f"{described}: expected package.module:Name")
    try:
        return _load_object(entry_point)
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise RequestError(f"{described} cannot be imported: {kind}{error}") from error


def _refuse_library(entry_point: str, described: str) -> None:
    if _split(entry_point)[0].partition(".")[0] in sys.stdlib_module_names:
        raise RequestError(f"{described} is of Python's standard library, which has no extensions; name one of yours")


def _look_for(entry_point: str, described: str) -> None:
    """Raise RequestError if there is certainly nothing at ``entry_point``. Imports and executes nothing."""
    _refuse_library(entry_point, described)
    module, attribute = _split(entry_point)
    file, name = _find_file(module), attribute.partition(".")[0]
    if file is None:
        missing = "there is no file" if is_file(entry_point) else "No module named"
        raise RequestError(f"{described} cannot be imported: {missing} '{module}'")
    if file.suffix != ".py":
        return
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RequestError(f"{described} cannot be imported: {file}: {error}") from None
    names: set[object] = {getattr(node, field, None) for node in nodes for field in ("name", "asname", "id")}
    if names.isdisjoint({name, "*", "__getattr__", "globals"}) and not (file.parent / f"{name}.py").is_file():
        raise RequestError(f"{described} cannot be imported: {file} has no {name}")


def _find_file(module: str) -> Path | None:
    """Return the file of a module, or the folder of a package without one, from the first part of its name alone: to
    look for a part of a package by ``find_spec`` imports the package. A path of a file is looked for in the working
    directory and beside recipes.
    """
    if module.endswith(".py"):
        paths = [Path(os.path.abspath(folder), expand_user_path(module)) for folder in (os.getcwd(), *_list_folders())]
        return next((path for path in paths if path.is_file()), None)
    first, *parts = module.split(".")
    try:
        # Not in sys.path: nothing else may be imported from folders that are only looked at.
        spec = find_spec(first) or PathFinder.find_spec(first, [os.getcwd(), *_list_folders()])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not parts:
        return Path(spec.origin or first)
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        if path.is_dir() or [*path.parent.glob(f"{path.name}.*.so")]:
            return path
    return None


def _is_place(name: str) -> bool:
    module, attribute = _split(name)
    parts = (*([] if is_file(name) else module.split(".")), *attribute.split("."))
    return all(part.isidentifier() for part in parts) and _find_file(module) is not None


def _is_there(reference: str) -> bool:
    try:
        return find_spec(_split(reference)[0]) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _split(entry_point: str) -> tuple[str, str]:
    """Return the module or file, and the name, of ``module:Name`` or ``file.py:Name``."""
    module, _, name = entry_point.rpartition(":")
    return module, name


def _list_folders() -> list[str]:
    return [*filter(None, os.environ.get(_FOLDERS, "").split(os.pathsep)), *_folders_of_recipes]


def _load_object(entry_point: str) -> Any:
    module, attribute = _split(entry_point)
    return attrgetter(attribute)(_import_file(module) if is_file(entry_point) else import_module(module))


def is_file(entry_point: str) -> bool:
    """Return whether a place is ``file.py:Name``."""
    return _split(entry_point)[0].endswith(".py")


def _import_file(path: str) -> ModuleType:
    """Import a file; modules beside it are found, after all others."""
    file = _find_file(path)
    if file is None:
        raise ImportError(f"there is no file {path}")
    name = f"{file.stem}@{file}"  # no module that is installed
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None, "a Python file"
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@cache
def _list_entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of Trainwright's groups.

    ``importlib.metadata.entry_points`` takes ten times as long, because it parses those of all packages.
    """
    by_distribution: dict[str, tuple[EntryPoint, ...]] = {}
    # The folder that a user works in can hold anybody's files; what is installed is elsewhere.
    for distribution in distributions(path=[path for path in sys.path if not is_working_directory(path)]):
        if "trainwright." in (distribution.read_text("entry_points.txt") or ""):
            by_distribution.setdefault(distribution.name, tuple(distribution.entry_points))  # the first counts
    return tuple(point for points in by_distribution.values() for point in points)
