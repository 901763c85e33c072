"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.errors import RequestError


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` and ``~user`` expanded.

    Raises:
        RequestError: there is no such user, or this user has no home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = os.fspath(path).partition("/")[0].removeprefix("~")
        why = f"there is no user {name}" if name else "this user has no home directory"
        raise RequestError(f"{os.fspath(path)}: {why}; write the whole path instead of ~{name}") from None
