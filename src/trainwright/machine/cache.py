"""The cache directory, for files that can be recreated."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainwright.errors import MachineError
from trainwright.paths import write_file


def cache_root() -> Path:
    """Return ``$TRAINWRIGHT_CACHE``, or by default ``~/.cache/trainwright``.

    Raises:
        MachineError: the user has no home directory.
    """
    try:
        return Path(os.environ.get("TRAINWRIGHT_CACHE") or "~/.cache/trainwright").expanduser()
    except RuntimeError:  # as in a container that runs under a numeric user id
        raise MachineError("this user has no home directory to keep a cache in; set TRAINWRIGHT_CACHE to one") from None


def try_write(file: Path, content: str | bytes) -> None:
    """Write ``file`` completely or not at all. A cache that cannot be written is not an error."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content)
