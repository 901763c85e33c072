"""A library that a strategy or an optimizer needs. Imports no torch."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from importlib.util import find_spec

from trainwright.errors import MachineError


@dataclass(frozen=True)
class Library:
    """A library that a value of a recipe needs.

    ``versions``: prefixes of the versions that work. ``users``: the values that need it, of ``key``.
    ``process_bytes``: what it adds to the resident memory of a process.
    """

    module: str
    title: str
    versions: tuple[str, ...]
    install: str
    users: str
    process_bytes: int = 0
    key: str = "parallel.strategy"

    @property
    def is_missing(self) -> bool:
        """Return whether the library is not installed."""
        return find_spec(self.module) is None

    def check(self) -> None:
        """Raise MachineError if it is not installed, or in a version that is not known to work."""
        try:
            version = importlib.metadata.version(self.module)
        except importlib.metadata.PackageNotFoundError:
            raise MachineError(
                f"{self.key}: {self.users} need {self.title}, which is not installed; {self.install}"
            ) from None
        if not f"{version}.".startswith(self.versions):
            raise MachineError(f"{self.key}: {self.title} {version} is not supported; {self.install}")
