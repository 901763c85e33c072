"""Write the files of checkpoints; complete, rename and remove their directories. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainwright.engine.checkpoints.manifest import FORMAT, MANIFEST, RECIPE, STATE, seal_of
from trainwright.utils.paths import sync

PIECE = 2 * 2**20  # that is read or written at once, and in memory
_UNSYNCED = 64 * 2**20  # most bytes that wait in memory for the disk


def write_synced(path: Path, data: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file, sync it to disk, and compare what is there. Return its size in bytes and its SHA-256.

    It is synced now and then meanwhile, so that a slow disk does not show all of its work at the end.

    Raises:
        OSError: the disk is full or not writable, or has other bytes; a partial file may remain.
    """
    digest, unsynced = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in (part[begin : begin + PIECE] for part in data for begin in range(0, len(part), PIECE)):
            file.write(piece)
            digest.update(piece)
            unsynced += len(piece)
            if unsynced >= _UNSYNCED:
                file.flush()
                os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
                unsynced = 0
        file.flush()
        os.fsync(file.fileno())
    compare_with_disk(path, digest.hexdigest())
    return path.stat().st_size, digest.hexdigest()


def finish(scratch: Path, final: Path, parts: list[dict[str, Any]], state: str, recipe: str) -> None:
    """Add the files other than tensors, then the manifest, and rename the checkpoint to its final name.

    Args:
        parts: the ranks' entries for the manifest.
        state: the JSON of the state other than tensors.
    """
    manifest: dict[str, Any] = {"format": FORMAT, "files": {}, "tensors": {}}
    for part in parts:
        manifest["files"].update(part["files"])
        for name, block in part["tensors"].items():
            manifest["tensors"].setdefault(name, []).append(block)
    for name, text in ((STATE, state), (RECIPE, recipe)):
        size, digest = write_synced(scratch / name, [text.encode()])
        manifest["files"][name] = {"size": size, "sha256": digest}
    write_synced(scratch / MANIFEST, [json.dumps({**manifest, "sha256": seal_of(manifest)}).encode()])
    sync(scratch)
    old = final.with_name(f".removing-{final.name}")
    if os.path.lexists(final):  # a checkpoint that was rejected when the run resumed from an earlier step
        final.rename(old)
    scratch.rename(final)
    sync(final.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a directory with its contents, a file, or a link (never its target), as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def checksum(file: BinaryIO) -> tuple[int, str]:
    """Return the size in bytes and SHA-256 of an open file."""
    digest = hashlib.sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
    return os.fstat(file.fileno()).st_size, digest.hexdigest()


def compare_with_disk(path: Path, digest: str) -> None:
    """Read a file again, from the disk where the system allows that. Raises OSError if it has another SHA-256."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if checksum(file)[1] != digest:
            raise OSError(f"{path} reads back differently from what was written")
