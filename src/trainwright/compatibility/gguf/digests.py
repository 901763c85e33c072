"""Digests of the content of large files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from trainwright.machine.cache import try_write


def remembered(file: Path, models: Path, what: str, make: Callable[[], str]) -> str:
    """Return a digest of the file's content, cached by path, size and time: hashing takes a second per GB."""
    stat = file.stat()
    identity = f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{what}"
    memo = models / ".fingerprints" / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    try:
        return memo.read_text(encoding="utf-8")
    except OSError:  # not remembered, or stale
        fingerprint = make()
        try_write(memo, fingerprint)
        return fingerprint


def digest_of(file: Path, name: str) -> str:
    """Return a file's digest by the algorithm of this name."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, name).hexdigest()
