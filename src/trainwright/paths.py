"""Paths as users write them, and files that are written as a whole."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from trainwright.errors import RequestError

_LATE_SECONDS, _LOOK_SECONDS = 30.0, 0.2


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


def appears(file: Path, text: str, seconds: float = _LATE_SECONDS) -> bool:
    """Return whether ``file`` has this text, as soon as it has, or after ``seconds``.

    What another machine has written to a shared file system may be seen late: NFS keeps attributes and names that do
    not exist for up to a minute (nfs(5), acregmax and acdirmax), and a file that was replaced can be stale (ESTALE).
    """
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError, UnicodeDecodeError):
            os.listdir(file.parent)  # asks the server for the directory again
            if file.read_text(encoding="utf-8") == text:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
