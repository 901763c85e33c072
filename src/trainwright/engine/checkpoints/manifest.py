"""The manifest of a checkpoint: which files it has, and which file holds which block of which tensor; its directory.

A checkpoint may come from an untrusted source. Everything is checked before use, and only regular files inside the
checkpoint's own directory are opened. Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainwright.errors import EXIT_FAULT, EXIT_MACHINE, TrainingError
from trainwright.models.safetensors_files import DamagedFile, read_header
from trainwright.utils.paths import open_inside, retry_stale, sync

FORMAT = 1
MANIFEST, STATE, RECIPE = "manifest.json", "state.json", "recipe.yaml"
_EVENTS = "events.jsonl"  # of a run

# Far above the largest runs: 100,000 tensors in 64 parts have a manifest of about 700 MB.
_MANIFEST_BYTES = 2**30
_TEXT_BYTES = 2**26
_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors|state\.json|recipe\.yaml")
_DIGEST = re.compile(r"[0-9a-f]{64}")

# What opening a file says if the checkpoint is not what it should be; None: an OSError of this program.
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG)

Block = dict[str, Any]  # file: str, offset and size: list[int]


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or does not match its manifest."""


class UnreadableCheckpoint(CheckpointError):
    """The machine could not read a checkpoint, which may be whole."""

    exit_code = EXIT_FAULT


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory has a manifest and a recipe, whatever they are, but no events, which a run has."""
    names = ((MANIFEST, True), (RECIPE, True), (_EVENTS, False))
    return all(os.path.lexists(directory / name) == expected for name, expected in names)


class Manifest:
    """A validated manifest: file names without directories, and blocks that make up full tensors."""

    def __init__(self, path: Path, content: Any) -> None:
        """Check ``content``, the JSON of the manifest of the checkpoint in ``path``. Raises CheckpointError."""
        try:
            seal = content.pop("sha256")
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path / MANIFEST} cannot be read: {error!r}") from error
        if seal != seal_of(content):
            raise CheckpointError(f"{path / MANIFEST} is damaged (checksum differs)")
        self.sha256: str = seal
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path}: written in format {content.get('format')!r}, not {FORMAT}")
        try:
            self.files = _parse_files(content["files"])
            self.tensors = _parse_tensors(content["tensors"], self.files)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path / MANIFEST} is not the manifest of a checkpoint: {error}") from error
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, blocks in self.tensors.items():
            for block in blocks:
                self._shapes.setdefault(block["file"], {})[name] = tuple(block["size"])

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Return the manifest of the checkpoint in ``path``. Raises CheckpointError."""
        try:
            content = json.loads(retry_stale(lambda: read_inside(path, MANIFEST, _MANIFEST_BYTES)))
        except (OSError, ValueError, RecursionError) as error:
            raise build_read_error(path / MANIFEST, error) from error
        return cls(path, content)

    def look_up_shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the blocks that ``file`` holds, by the names of their tensors."""
        return self._shapes.get(file, {})


def build_checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step`` in ``directory``."""
    return directory / f"step-{step:08d}"


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the checkpoints by step, ascending, verified or not; empty if the directory does not exist."""
    names = []
    with suppress(FileNotFoundError, NotADirectoryError):  # if it cannot be read, there may be checkpoints
        names = os.listdir(directory)
    matches = (re.fullmatch(r"step-([0-9]{8,})", name) for name in names)
    steps = sorted(step for m in matches if m and build_checkpoint_path(directory, step := int(m[1])).name == m[0])
    return {step: build_checkpoint_path(directory, step) for step in steps}


def step_of(name: str) -> int:
    """Return the step of the checkpoint of this name."""
    return int(name.rpartition("-")[2])


def seal_of(manifest: dict[str, Any]) -> str:
    """Return the checksum of the manifest itself: a flipped byte in it could move a tensor's block."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """Return the state other than tensors of the checkpoint in ``path``. Raises CheckpointError."""
    try:
        state = json.loads(retry_stale(lambda: read_inside(path, STATE, _TEXT_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        raise build_read_error(path / STATE, error) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} is not the state of a run")
    return state


def read_inside(directory: Path, name: str, limit: int) -> str:
    """Return the text of a regular file of at most ``limit`` bytes. Raises OSError or ValueError."""
    with open_inside(directory, name) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise ValueError(f"it has {size:,} bytes, more than any valid one")
        return file.read(size).decode()  # not read(limit), which allocates that much memory before reading


def check_tensors(path: Path, file: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless the header of a tensor file matches the manifest."""
    shapes = manifest.look_up_shapes(file)
    try:
        open_inside(path, file).close()
        header = read_header(path / file)
    except (OSError, DamagedFile) as error:
        raise build_read_error(path / file, error) from error
    if header != shapes:
        raise CheckpointError(f"{path / file} does not contain the tensors listed in the manifest")


def build_read_error(path: Path, error: Exception) -> CheckpointError:
    """Return why a checkpoint cannot be used, of which ``path`` could not be read."""
    message = f"{path} cannot be read: {(isinstance(error, OSError) and error.strerror) or error}"
    if not isinstance(error, OSError) or error.errno in _DAMAGE:
        return CheckpointError(message)
    unreadable = UnreadableCheckpoint(message)
    if isinstance(error, PermissionError):
        unreadable.exit_code = EXIT_MACHINE
    return unreadable


def _parse_files(files: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return the size and SHA-256 of every file, by name."""
    by_name = {}
    for name, entry in files.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a checkpoint's file")
        size, digest = entry["size"], entry["sha256"]
        if not _is_count(size) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"the size or checksum of {name} is missing")
        by_name[name] = (size, digest)
    if lost := {STATE, RECIPE} - by_name.keys():
        raise ValueError(f"{', '.join(sorted(lost))} is not in it")
    return by_name


def _parse_tensors(tensors: dict[str, list[Block]], files: dict[str, tuple[int, str]]) -> dict[str, list[Block]]:
    for name, blocks in tensors.items():
        if not isinstance(blocks, list) or not blocks:
            raise ValueError(f"tensor {name} has no blocks")
        for block in blocks:
            file, offset, size = block["file"], block["offset"], block["size"]
            if file not in files or not file.endswith(".safetensors"):
                raise ValueError(f"tensor {name} is in {file!r}, which is not among its files")
            if not all(_is_count(number) for number in (*offset, *size)):
                raise ValueError(f"tensor {name} has a block at no place")
        _check_complete(name, blocks)
    return tensors


def compute_full_shape(blocks: Iterable[Block]) -> tuple[int, ...]:
    """Return the shape of the tensor that these blocks make up."""
    ends = [[o + s for o, s in zip(block["offset"], block["size"], strict=True)] for block in blocks]
    return tuple(max(dimension) for dimension in zip(*ends, strict=True))


def _check_complete(name: str, blocks: list[Block]) -> None:
    """Check that blocks fill their tensor: distinct files and offsets, and together the tensor's number of elements."""
    offsets = {tuple(block["offset"]) for block in blocks}
    files = {block["file"] for block in blocks}
    elements = sum(math.prod(block["size"]) for block in blocks)
    if len(offsets) < len(blocks) or len(files) < len(blocks) or elements != math.prod(compute_full_shape(blocks)):
        raise ValueError(f"the blocks of tensor {name} do not make one whole")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


PIECE = 2 * 2**20  # that is read or written at once, and in memory
_UNSYNCED = 64 * 2**20  # most bytes that wait in memory for the disk


def write_synced(path: Path, data: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file, sync it to disk, and compare what is there. Return its size in bytes and its SHA-256.

    It is synced now and then meanwhile, so that a slow disk does not show all of its work at the end.

    Raises:
        OSError: the disk is full or not writable, or has other bytes; a partial file may remain.
    """
    digest, unsynced_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in (part[begin : begin + PIECE] for part in data for begin in range(0, len(part), PIECE)):
            file.write(piece)
            digest.update(piece)
            unsynced_bytes += len(piece)
            if unsynced_bytes >= _UNSYNCED:
                file.flush()
                os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
                unsynced_bytes = 0
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


def compute_checksum(file: BinaryIO) -> tuple[int, str]:
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
        if compute_checksum(file)[1] != digest:
            raise OSError(f"{path} reads back differently from what was written")
