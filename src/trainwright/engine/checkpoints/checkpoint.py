"""Checkpoints: written atomically, verified by checksum, and loaded on any number of ranks.

    checkpoints/step-00000040/
      rank-00000.safetensors …   each rank's part of the state; a tensor may be split over several files
      state.json                 step, position in the data, metrics: everything that is not a tensor
      recipe.yaml                the resolved recipe
      manifest.json              size and SHA-256 of every file and of itself, and which file holds which block of
                                 which tensor

A checkpoint is written under a temporary name, synced, given its manifest, and renamed. Each block records its offset
in the full tensor, so a checkpoint loads on any number of ranks.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.engine.checkpoints.manifest import (
    RECIPE,
    CheckpointError,
    Manifest,
    build_checkpoint_path,
    build_read_error,
    check_tensors,
    compute_checksum,
    compute_full_shape,
    finish,
    list_checkpoints,
    read_state,
    remove,
)
from trainwright.engine.checkpoints.writer import write_tensors
from trainwright.errors import RequestError
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World
from trainwright.recipe.loading import load_recipe
from trainwright.utils.paths import open_inside, retry_stale

Entries = dict[str, Any]  # of one rank's file in the manifest


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    path: Path
    seconds: float


class Checkpoints:
    """Manage the checkpoints of one run. Every rank must call the methods that take a world."""

    def __init__(self, directory: Path, *, keep_last: int, keep_best: bool) -> None:
        self.directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._unusable: set[int] = set()  # steps of checkpoints that this process has read and refused

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of ``step``."""
        return build_checkpoint_path(self.directory, step)

    def scratch(self, step: int) -> Path:
        """Return the directory that the checkpoint of ``step`` is written in before it is complete."""
        return self.directory / f".writing-{self.path(step).name}"

    def save(
        self, world: World, step: int, shards: Mapping[str, Shard], state: dict[str, Any], recipe: str
    ) -> SavedCheckpoint:
        """Write the checkpoint of ``step``; ``state`` must be the same on every rank.

        Raises:
            CheckpointError: on every rank, if any rank could not write. The partial checkpoint is removed and earlier
                checkpoints are untouched.
        """
        started_at = time.monotonic()
        final, scratch, outcome = self.path(step), self.scratch(step), self.prepare(world)
        if outcome is None:
            outcome = catch_os_error(lambda: _write_part(scratch, world.rank, shards), scratch)
        outcomes = world.gather(outcome)
        if world.is_main and not any(isinstance(o, str) for o in outcomes):
            text = json.dumps(state, indent=1)
            outcomes = [catch_os_error(lambda: finish(scratch, final, outcomes, text, recipe), scratch)]
        self.conclude(world, step, next((o for o in outcomes if isinstance(o, str)), None))
        return SavedCheckpoint(final, time.monotonic() - started_at)

    def prepare(self, world: World) -> str | None:
        """Remove what interrupted writes left, before any rank writes; return why it failed on this rank, if it did."""
        outcome = catch_os_error(self._remove_leftovers, self.directory) if world.is_main else None
        world.barrier()
        return outcome

    def conclude(self, world: World, step: int, failure: str | None) -> None:
        """Record on every rank how rank 0's writing of a checkpoint ended.

        Raises:
            CheckpointError: on every rank, if rank 0 has a ``failure``. The partial checkpoint is removed.
        """
        failure = world.broadcast(failure)
        if failure is not None:
            if world.is_main:
                remove(self.scratch(step))
            raise CheckpointError(f"checkpoint of step {step} was not written: {failure}")
        if world.is_main:
            self._unusable.discard(step)

    def prune(
        self, best: int | None, remove: Callable[[Path], None] = remove, trusted_before: int | None = None
    ) -> None:
        """Remove old checkpoints with ``remove``, except the last few usable ones and the best. Only rank 0 calls
        this, after a save.

        Unusable checkpoints do not count, so the newest usable one is never removed. Neither is the newest one from
        before step ``trusted_before``.

        Raises:
            OSError: some checkpoints could not be removed, and still exist.
        """
        steps, usable = self.steps(), 0
        while steps and usable < self._keep_last:
            if len(steps) <= self._keep_last - usable:
                return  # all checkpoints are kept, usable or not
            usable += self._is_usable(steps.pop())
        retained_steps = {best} if self._keep_best else set()
        if trusted_before is not None:
            retained_steps.add(max((step for step in self.steps() if step < trusted_before), default=None))
        for step in steps:
            if step not in retained_steps:
                self._remove(step, remove)

    def remove_from(self, step: int) -> None:
        """Remove the checkpoints of ``step`` and later ones. Raises OSError."""
        for later in self.steps():
            if later >= step:
                self._remove(later, remove)

    def _remove(self, step: int, remove: Callable[[Path], None]) -> None:
        # Rename first, so that a kill during removal leaves no partial checkpoint under a valid name.
        renamed_path = self.directory / f".removing-{self.path(step).name}"
        self.path(step).rename(renamed_path)
        remove(renamed_path)

    def _is_usable(self, step: int) -> bool:
        """Return whether a checkpoint has not been refused, and has a valid manifest and files of the sizes in it.

        No file of tensors is read, as training waits for this.
        """
        path = self.path(step)
        if step in self._unusable or path.is_symlink():
            return False
        try:
            files = Manifest.read(path).files
            return all((path / name).lstat().st_size == size for name, (size, _) in files.items())
        except (CheckpointError, OSError):
            return False

    def _open(self, step: int) -> Checkpoint | CheckpointError:
        """Return the checkpoint, or the reason why it cannot be used."""
        path = self.path(step)
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise CheckpointError(f"{path} is not a directory")
            return Checkpoint.open(path)
        except OSError as error:
            reason = build_read_error(path, error)
        except CheckpointError as error:
            reason = error
        self._unusable.add(step)
        return reason

    def _remove_leftovers(self) -> None:
        for pattern in (".writing-*", ".removing-*"):
            for path in self.directory.glob(pattern):
                remove(path)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint directory, ascending. A directory may still fail verification."""
        return sorted(list_checkpoints(self.directory))

    def find_latest(self, before: int | None = None) -> tuple[Checkpoint | None, list[CheckpointError]]:
        """Return the newest checkpoint that verifies, and why each newer one was rejected.

        Those of step ``before`` and later ones are passed over.

        Raises:
            UnreadableCheckpoint: the machine could not read which checkpoints there are.
        """
        errors: list[CheckpointError] = []
        try:
            steps = self.steps()
        except OSError as error:
            raise build_read_error(self.directory, error) from error
        for step in reversed(steps):
            if before is not None and step >= before:
                continue
            result = self._open(step)
            if isinstance(result, Checkpoint):
                return result, errors
            errors.append(result)
        return None, errors


class Checkpoint:
    """A verified checkpoint."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._manifest = manifest
        self.state: dict[str, Any] = read_state(path)

    @property
    def step(self) -> int:
        """The step in the name of its directory."""
        return int(self.path.name.rpartition("-")[2])

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> Checkpoint:
        """Open a checkpoint and verify every file against its checksum, unless another rank just did.

        Raises:
            CheckpointError: a file is missing or differs from the manifest; the message names the first one.
            UnreadableCheckpoint: the machine could not read a file.
        """
        manifest = Manifest.read(path)
        for name, expected in manifest.files.items() if verify else ():
            try:
                actual = retry_stale(partial(_compute_checksum_if_sized, path, name, expected[0]))
            except OSError as error:
                raise build_read_error(path / name, error) from error
            if actual != expected:
                raise CheckpointError(f"{path / name} is damaged (size or checksum differs)")
            if name.endswith(".safetensors"):
                check_tensors(path, name, manifest)
        return cls(path, manifest)

    def has_optimizer(self, name: str, tensors: set[str]) -> bool:
        """Return whether the checkpoint has exactly these tensors of the state of the optimizer ``name``."""
        stored_names = {tensor for tensor in self._manifest.tensors if tensor.startswith("optimizer.")}
        return stored_names == tensors and load_recipe(self.path / RECIPE).optimizer.name == name

    def open_reader(self) -> Reader:
        """Return a reader of any blocks of any tensors. Use it as a context manager."""
        return Reader(self.path, self._manifest)


class Reader:
    """Read any block of any tensor of a checkpoint, across the files that hold it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, name: str, shard: Shard) -> torch.Tensor:
        """Return the block of tensor ``name`` that ``shard`` describes.

        Raises:
            RequestError: the checkpoint belongs to another model: the tensor is missing or has another shape.
            CheckpointError: a file does not match the manifest.
        """
        blocks = self._manifest.tensors.get(name)
        if blocks is None and 0 in shard.shape:  # without elements, it is in no file
            return torch.empty_like(shard.local, device="cpu")
        if blocks is None:
            raise RequestError(f"{self._path} has no {name}: it was written by another model or optimizer")
        if (shape := compute_full_shape(blocks)) != shard.shape:
            raise RequestError(f"{self._path}: {name} has shape {list(shape)}, but the model needs {list(shard.shape)}")
        result = torch.empty_like(shard.local, device="cpu")
        for block in blocks:
            _copy_overlap(result, shard.offset, block, lambda b=block: self._open(b["file"]).get_slice(name))
        return result

    def weights(self, name: str, shard: Shard) -> torch.Tensor:
        """Return a block of parameter ``name`` as it is evaluated and exported: of its average, if there is one.

        Raises as a call.
        """
        average = f"optimizer.average.{name}"
        return self(average if average in self._manifest.tensors else f"model.{name}", shard)

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._files:
            check_tensors(self._path, name, self._manifest)
            self._files[name] = self._stack.enter_context(safe_open(self._path / name, framework="pt"))
        return self._files[name]


def _compute_checksum_if_sized(path: Path, name: str, size: int) -> tuple[int, str] | None:
    """Return the size and SHA-256 of a file in ``path``, or None without reading it if it has another size."""
    with open_inside(path, name) as file:
        return compute_checksum(file) if os.fstat(file.fileno()).st_size == size else None


def _copy_overlap(result: torch.Tensor, offset: tuple[int, ...], block: dict[str, Any], source: Any) -> None:
    into, out_of = [], []
    for want, length, have, size in zip(offset, result.shape, block["offset"], block["size"], strict=True):
        begin, end = max(want, have), min(want + length, have + size)
        if begin >= end:
            return
        into.append(slice(begin - want, end - want))
        out_of.append(slice(begin - have, end - have))
    tensor = source()[tuple(out_of)] if out_of else source()[...]
    result[tuple(into)] = tensor


def _write_part(scratch: Path, rank: int, shards: Mapping[str, Shard]) -> Entries:
    """Write this rank's blocks; return their entries for the manifest."""
    make_scratch(scratch)
    mine = own_blocks(shards)
    file = format_part_name(rank)
    size, digest = write_tensors(scratch / file, {name: shard.local for name, shard in mine.items()})
    return build_entries(file, size, digest, build_block_entries(file, mine))


def make_scratch(scratch: Path) -> None:
    """Make the directory that a checkpoint is written in."""
    # Without parents: if the run directory was deleted, do not create it again.
    scratch.parent.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)


def format_part_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def build_entries(file: str, size: int, digest: str, tensors: dict[str, Any]) -> Entries:
    """Return the entries of a rank's file for the manifest; for ``tensors`` see ``build_block_entries``."""
    return {"files": {file: {"size": size, "sha256": digest}}, "tensors": tensors}


def build_block_entries(file: str, blocks: Mapping[str, Shard]) -> dict[str, Any]:
    """Return the manifest's entry of each block in a rank's file."""
    return {
        name: {"file": file, "offset": list(shard.offset), "size": list(shard.local.shape)}
        for name, shard in blocks.items()
    }


def own_blocks(shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """Return the blocks that this rank writes. Replicas share the work: each next block goes to the
    replica with the fewest bytes so far.

    All ranks compute the same result without communication, because replicas of a block agree on the sizes of all
    blocks with the same number of replicas.
    """
    loads: dict[int, list[int]] = {}
    local_blocks = {}
    for name, shard in shards.items():
        load = loads.setdefault(shard.replicas, [0] * shard.replicas)
        owner = load.index(min(load))
        load[owner] += shard.local.numel() * shard.local.element_size()
        if owner == shard.replica and shard.local.numel():
            local_blocks[name] = shard
    return local_blocks


def catch_os_error(action: Any, path: Path) -> Any:
    """Return the action's result, or a message why it failed at ``path``: ranks agree before any of them raises."""
    try:
        return action()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or path})"
