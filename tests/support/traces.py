"""Traces of models, shared by all processes of the tests, and by later sessions of the same sources.

A trace takes a second, and most runs of tests need some.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from tests.support.commands import ROOT


def shared_directory(parent: Path) -> Path:
    """A directory in ``parent`` for the traces that today's sources make; those of other sources are removed."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "src").rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)} {file.stat().st_size} ".encode() + file.read_bytes())
    directory = parent / digest.hexdigest()[:24]
    for other in parent.iterdir():
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
    directory.mkdir(exist_ok=True)
    return directory


def share(cache: Path, directory: Path | None = None) -> None:
    """Let a new cache have the traces of ``directory``, or of this session."""
    cache.mkdir()
    (cache / "traces").symlink_to(directory or Path(os.environ["TRAINWRIGHT_CACHE"]) / "traces")
