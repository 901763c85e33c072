"""Where what can be made again is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """``$TRAINWRIGHT_CACHE``, else ``~/.cache/trainwright``."""
    return Path(os.environ.get("TRAINWRIGHT_CACHE") or Path.home() / ".cache" / "trainwright").expanduser()
