"""Modules that have moved, under the names that documentation of the last version gave: for one version."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

# Of packages too: what was in one is in the other.
_MOVED = {
    "trainwright.extensions": "trainwright.recipe.extensions",
    "trainwright.observe.reader": "trainwright.engine.event_reader",
    "trainwright.reinforcement": "trainwright.tasks.algorithm_distillation",
}


def install() -> None:
    """Have imports of old names find the modules."""
    sys.meta_path.insert(0, _Finder())  # before the finder of paths, which would load a module of such a package again


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for old, new in _MOVED.items():
            if fullname == old or fullname.startswith(f"{old}."):
                return spec_from_loader(fullname, _OfMoved(new + fullname.removeprefix(old)), is_package=True)
        return None


class _OfMoved(Loader):
    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(f"{module.__name__} is now {self._name}", FutureWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(self._name)
