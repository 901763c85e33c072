"""Checkpoints that are whole and verified, or not there.

    checkpoints/step-00000040/
      rank-00000.safetensors …   each rank's part of the state; a tensor may be split over several files
      state.json                 step, position in the data, metrics: everything that is not a tensor
      recipe.yaml                the resolved recipe
      manifest.json              size and SHA-256 of every file and of itself, and which file holds which block of
                                 which tensor

A checkpoint is written under another name, synced, given its manifest, and renamed. Blocks carry their place in the
whole tensor, so a checkpoint loads on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.engine.tensor_files import checksum, sync_directory, write_tensors
from trainwright.errors import RequestError, TrainingError
from trainwright.parallel.shards import Shard
from trainwright.parallel.world import World

_FORMAT = 1


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    seconds: float


class Checkpoints:
    """The checkpoints of one run. All methods that take a world are called by every rank."""

    def __init__(self, directory: Path, *, keep_last: int, keep_best: bool) -> None:
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best

    def path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def save(self, world: World, step: int, shards: Mapping[str, Shard], state: dict[str, Any], recipe: str) -> Saved:
        """Write the checkpoint of ``step``; ``state`` is the same on every rank.

        Raises:
            CheckpointError: on every rank, when any of them could not write. Nothing of it is left behind and
                earlier checkpoints are untouched.
        """
        begun = time.monotonic()
        final, scratch = self.path(step), self._directory / f".writing-{self.path(step).name}"
        if world.is_main:
            self._remove_leftovers()
        world.barrier()
        outcome = _attempt(lambda: _write_part(scratch, world.rank, shards))
        outcomes = world.gather(outcome)
        if world.is_main and not any(isinstance(o, str) for o in outcomes):
            outcomes = [_attempt(lambda: _finish(scratch, final, outcomes, state, recipe))]
        failure = world.broadcast(next((o for o in outcomes if isinstance(o, str)), None))
        if failure is not None:
            if world.is_main:
                shutil.rmtree(scratch, ignore_errors=True)
            raise CheckpointError(f"checkpoint of step {step} was not written: {failure}")
        return Saved(final, time.monotonic() - begun)

    def prune(self, best: int | None) -> None:
        """Remove all but the last few and the best. Called by rank 0 alone, after a save."""
        steps = self.steps()
        keep = set(steps[-self._keep_last :])
        if self._keep_best and best is not None:
            keep.add(best)
        for step in steps:
            if step not in keep:
                # Renamed first: a kill between the two leaves no half checkpoint under a valid name.
                doomed = self._directory / f".removing-{self.path(step).name}"
                self.path(step).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """What a kill left of a checkpoint being written or removed."""
        for pattern in (".writing-*", ".removing-*"):
            for path in self._directory.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, ascending. It may still fail its verification."""
        names = self._directory.glob("step-*") if self._directory.is_dir() else ()
        return sorted(int(path.name[5:]) for path in names if path.name[5:].isdigit())

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and why each newer one was refused."""
        refused: list[str] = []
        for step in reversed(self.steps()):
            try:
                return Checkpoint.open(self.path(step)), refused
            except CheckpointError as error:
                refused.append(str(error))
        return None, refused


class CheckpointError(TrainingError):
    """A checkpoint that could not be written, or that is not what its manifest says."""


class Checkpoint:
    """A verified checkpoint."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._blocks: dict[str, list[dict[str, Any]]] = manifest["tensors"]
        self.state: dict[str, Any] = json.loads((path / "state.json").read_text())

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> Checkpoint:
        """Open a checkpoint and read every byte of it against its checksum, unless another rank just did.

        Raises:
            CheckpointError: naming the first file that is missing or not as the manifest has it.
        """
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            seal = manifest.pop("sha256")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}/manifest.json cannot be read: {error!r}") from error
        if seal != _seal(manifest):
            raise CheckpointError(f"{path}/manifest.json is not what was written (checksum differs)")
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"{path}: written in format {manifest['format']}, not {_FORMAT}")
        for name, expected in manifest["files"].items() if verify else ():
            try:
                found = checksum(path / name)
            except OSError as error:
                raise CheckpointError(f"{path}/{name} cannot be read: {error.strerror}") from error
            if found != (expected["size"], expected["sha256"]):
                raise CheckpointError(f"{path}/{name} is not what was written (size or checksum differs)")
        return cls(path, manifest)

    def reader(self) -> Reader:
        """Reads tensors, each in whatever blocks are asked for. Use as a context manager."""
        return Reader(self.path, self._blocks)


class Reader:
    """Gives any block of any tensor of a checkpoint, from whichever files hold it."""

    def __init__(self, path: Path, blocks: dict[str, list[dict[str, Any]]]) -> None:
        self._path = path
        self._blocks = blocks
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, name: str, shard: Shard) -> torch.Tensor:
        """The block of tensor ``name`` that ``shard`` describes.

        Raises:
            RequestError: the checkpoint is of another model: no such tensor, or of another shape.
        """
        blocks = self._blocks.get(name)
        if blocks is None:
            raise RequestError(f"{self._path} has no {name}: it was written by another model or optimizer")
        whole = [max(b["offset"][d] + b["size"][d] for b in blocks) for d in range(len(shard.shape))]
        if tuple(whole) != shard.shape:
            raise RequestError(f"{self._path}: {name} has shape {whole}, the model wants {list(shard.shape)}")
        result = torch.empty_like(shard.local, device="cpu")
        for block in blocks:
            _copy_overlap(result, shard.offset, block, lambda b=block: self._open(b["file"]).get_slice(name))
        return result

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self._path / name, framework="pt"))
        return self._files[name]


def _copy_overlap(result: torch.Tensor, offset: tuple[int, ...], block: dict[str, Any], source: Any) -> None:
    """Copy what a stored block and the wanted block have in common."""
    into, out_of = [], []
    for want, length, have, size in zip(offset, result.shape, block["offset"], block["size"], strict=True):
        begin, end = max(want, have), min(want + length, have + size)
        if begin >= end:
            return
        into.append(slice(begin - want, end - want))
        out_of.append(slice(begin - have, end - have))
    tensor = source()[tuple(out_of)] if out_of else source()[...]
    result[tuple(into)] = tensor


def _write_part(scratch: Path, rank: int, shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Write this rank's blocks; what its manifest needs to know of them."""
    scratch.mkdir(parents=True, exist_ok=True)
    mine = {name: shards[name] for name in _own(shards)}
    file = f"rank-{rank:05d}.safetensors"
    size, digest = write_tensors(scratch / file, {name: shard.local for name, shard in mine.items()})
    tensors = {
        name: {"file": file, "offset": list(shard.offset), "size": list(shard.local.shape)}
        for name, shard in mine.items()
    }
    return {"files": {file: {"size": size, "sha256": digest}}, "tensors": tensors}


def _own(shards: Mapping[str, Shard]) -> list[str]:
    """Which blocks this rank writes: replicas share the work, each next block going to the one with least so far.

    Ranks come to the same answer without speaking, as replicas of a block agree on the sizes of all blocks with
    as many replicas.
    """
    loads: dict[int, list[int]] = {}
    own = []
    for name, shard in shards.items():
        load = loads.setdefault(shard.replicas, [0] * shard.replicas)
        owner = load.index(min(load))
        load[owner] += shard.local.numel() * shard.local.element_size()
        if owner == shard.replica and shard.local.numel():
            own.append(name)
    return own


def _finish(scratch: Path, final: Path, parts: list[dict[str, Any]], state: dict[str, Any], recipe: str) -> None:
    """Add what is not a tensor, then the manifest, and give the checkpoint its name."""
    manifest: dict[str, Any] = {"format": _FORMAT, "files": {}, "tensors": {}}
    for part in parts:
        manifest["files"].update(part["files"])
        for name, block in part["tensors"].items():
            manifest["tensors"].setdefault(name, []).append(block)
    for name, text in (("state.json", json.dumps(state, indent=1)), ("recipe.yaml", recipe)):
        _write_text(scratch / name, text)
        size, digest = checksum(scratch / name)
        manifest["files"][name] = {"size": size, "sha256": digest}
    _write_text(scratch / "manifest.json", json.dumps({**manifest, "sha256": _seal(manifest)}))
    sync_directory(scratch)
    old = final.with_name(f".removing-{final.name}")
    if final.exists():  # one that was refused when the run was resumed from an earlier step
        final.rename(old)
    scratch.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _seal(manifest: dict[str, Any]) -> str:
    """The manifest's own checksum: a byte that flips in it could send a tensor's block to another place."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _attempt(action: Any) -> Any:
    """The action's result, or in words why it could not be done: ranks must agree before any of them raises."""
    try:
        return action()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or 'while writing'})"
