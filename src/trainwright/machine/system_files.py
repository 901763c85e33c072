"""Files of the kernel and its drivers."""

from __future__ import annotations

from pathlib import Path


def read(path: Path) -> str:
    """Return the content of a file; empty if it does not exist or cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
