"""The cache directory, for files that can be recreated."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from trainwright.errors import MachineError


def cache_root() -> Path:
    """Return ``$TRAINWRIGHT_CACHE``, or by default ``~/.cache/trainwright``.

    Raises:
        MachineError: the user has no home directory.
    """
    try:
        return Path(os.environ.get("TRAINWRIGHT_CACHE") or "~/.cache/trainwright").expanduser()
    except RuntimeError:  # as in a container that runs under a numeric user id
        raise MachineError("this user has no home directory to keep a cache in; set TRAINWRIGHT_CACHE to one") from None


def keep(file: Path, text: str) -> None:
    """Write ``file`` atomically. A cache that cannot be written is not an error."""
    scratch = file.with_suffix(f".{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
