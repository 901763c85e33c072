"""Paths as users write them, and files that are written as a whole."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
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


def write_file(file: Path, content: str | bytes) -> None:
    """Write ``file`` completely or not at all; text as UTF-8. Raises OSError."""
    scratch = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        scratch.replace(file)
    except OSError:
        with suppress(OSError):  # written in part if the disk is full
            scratch.unlink()
        raise
