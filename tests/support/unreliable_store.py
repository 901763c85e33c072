"""A file system of fsspec on the local disk that fails or waits where a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry


def _nothing(operation: str, path: str) -> None:
    pass


class UnreliableStore(LocalFileSystem):
    """What ``unreliable:///directory`` names. ``before`` is called with an operation and its path, and may raise."""

    protocol = "unreliable"
    before: ClassVar[Callable[[str, str], None]] = _nothing

    @classmethod
    def install(cls, patch: pytest.MonkeyPatch) -> None:
        """Make the scheme known, without failures."""
        patch.setitem(_registry, cls.protocol, cls)
        cls.mend()

    @classmethod
    def set(cls, before: Callable[[str, str], None]) -> None:
        """Have it fail or wait from now on."""
        cls.before = staticmethod(before)

    @classmethod
    def reset_connections(cls, operation: str, part: str = "") -> None:
        """Have every operation of this kind fail on paths that have ``part`` in them."""

        def before(asked: str, path: str) -> None:
            if asked == operation and part in path:
                raise ConnectionResetError("the connection was reset")

        cls.set(before)

    @classmethod
    def mend(cls) -> None:
        """Have it work again."""
        cls.set(_nothing)

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.before("list", path)
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.before("info", path)
        return super().info(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.before("read" if mode == "rb" else "write", path)
        return super()._open(path, mode, **options)
