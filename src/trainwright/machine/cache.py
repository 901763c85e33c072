"""Where what can be made again is kept."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def cache_root() -> Path:
    """``$TRAINWRIGHT_CACHE``, else ``~/.cache/trainwright``."""
    return Path(os.environ.get("TRAINWRIGHT_CACHE") or Path.home() / ".cache" / "trainwright").expanduser()


def keep(file: Path, text: str) -> None:
    """Write ``file`` whole or not at all. A cache that cannot be written is no reason to stop."""
    scratch = file.with_suffix(f".{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
