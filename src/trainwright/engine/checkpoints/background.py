"""Checkpoints that are written while training goes on: at most one at a time, the same file format.

The next forward and backward passes only read what a checkpoint holds, so a thread of each rank copies it meanwhile,
and then writes that rank's file from the copy; only the next update of the weights waits for the copy. The ranks tell
one another that their files are complete in the report that they exchange at every step anyway; then a thread of rank 0
adds the manifest and renames the checkpoint. So no rank waits for a disk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from trainwright.engine.checkpoints.checkpoint import (
    CheckpointError,
    Checkpoints,
    SavedCheckpoint,
    build_block_entries,
    build_entries,
    catch_os_error,
    format_part_name,
    make_scratch,
    own_blocks,
)
from trainwright.engine.checkpoints.manifest import finish, remove
from trainwright.engine.checkpoints.writer import BackgroundTask, Writer
from trainwright.machine.detect import detect
from trainwright.parallel.layout import Shard
from trainwright.parallel.world import World, can_allocate_on_host

_WRITING, _PART, _COMPLETE = 0.0, 1.0, 2.0  # what a rank reports
# checkpoint.background: auto. Below, writing takes less time than a copy is worth.
_BACKGROUND_BYTES = 64 * 2**20
# From this share of the time of writing on, in which a processor computes, it takes that time from the training.
_COMPUTING = 0.5


@dataclass
class _InFlight:
    """A checkpoint that is being written. ``part``: the work on this rank's file, or why it could not begin.

    It has no tensors: they may be released.
    """

    step: int
    located: dict[str, Any]  # the manifest's entries of this rank's blocks
    state: dict[str, Any]
    recipe: str
    part: BackgroundTask | str
    started_at: float = field(default_factory=time.monotonic)
    parts_complete: bool = False
    completion: BackgroundTask | None = None  # on rank 0


class Background:
    """Write the checkpoints of a run in the background. Every rank must call ``begin``, ``advance`` and ``flush``.

    Attributes:
        usable: false once any rank had no memory for a copy.
    """

    def __init__(self, checkpoints: Checkpoints, world: World) -> None:
        self.usable = True
        self._checkpoints = checkpoints
        self._world = world
        self._writer: Writer | None = None
        self._flight: _InFlight | None = None
        self._removals: list[BackgroundTask] = []

    @property
    def step(self) -> int | None:
        """The step of the checkpoint that is being written; None if there is none."""
        return None if self._flight is None else self._flight.step

    @property
    def report(self) -> float:
        """What this rank tells the others at the next step."""
        flight = self._flight
        if flight is None:
            return _WRITING
        if flight.completion is not None and flight.completion.done:
            return _COMPLETE
        return _PART if isinstance(flight.part, str) or flight.part.done else _WRITING

    def get_ready(self, size: int) -> None:
        """Begin to allocate memory for ``size`` bytes, so that no checkpoint waits for it."""
        with suppress(OSError):  # the first checkpoint will say it
            self._writer = self._writer or Writer()
            self._writer.allocate(size)

    def begin(
        self, step: int, shards: Mapping[str, Shard], state: dict[str, Any], recipe: str, changing: Set[int]
    ) -> None:
        """Begin to write the checkpoint of ``step``; for the arguments see ``Checkpoints.save`` and ``Writer.write``.

        What fails is raised by the ``advance`` or ``flush`` that concludes it.
        """
        assert self._flight is None
        blocks, scratch = own_blocks(shards), self._checkpoints.scratch(step)
        part: BackgroundTask | str | None = self._checkpoints.prepare(self._world)
        if part is None:
            part = catch_os_error(lambda: self._write(scratch, blocks, changing), scratch)
        assert part is not None
        manifest_entries = build_block_entries(format_part_name(self._world.rank), blocks)
        self._flight = _InFlight(step, manifest_entries, state, recipe, part)

    def _write(self, scratch: Path, blocks: Mapping[str, Shard], changing: Set[int]) -> BackgroundTask:
        make_scratch(scratch)
        self._writer = self._writer or Writer()
        tensors = {name: shard.local for name, shard in blocks.items()}
        return self._writer.write(scratch / format_part_name(self._world.rank), tensors, changing)

    @property
    def is_copied(self) -> bool:
        """Whether the tensors may change."""
        return self._writer is None or self._writer.copied.is_set()

    def wait_copied(self) -> None:
        """Wait until the tensors may change."""
        if self._writer is not None:
            self._writer.copied.wait()

    def advance(self, reports: Sequence[float]) -> SavedCheckpoint | None:
        """Do what the ranks' reports allow; return the checkpoint if it is complete now.

        Raises:
            CheckpointError: on every rank; see ``Checkpoints.save``.
        """
        flight = self._flight
        if flight is None:
            return None
        if not flight.parts_complete:
            if all(report == _PART for report in reports):
                self._complete(flight)
            return None
        return self._conclude(flight) if reports[0] == _COMPLETE else None

    def flush(self) -> SavedCheckpoint | None:
        """Wait for the checkpoint that is being written, if there is one; return it. Raises like ``advance``."""
        flight = self._flight
        if flight is None:
            return None
        if not flight.parts_complete:
            self._complete(flight)
        return self._conclude(flight)

    def remove(self, path: Path) -> None:
        """Remove a directory, which takes long for large files; in the background if checkpoints are written there."""
        if self._writer is None:
            remove(path)
        else:
            self._removals = [removal for removal in self._removals if not removal.done]
            self._removals.append(BackgroundTask(lambda: remove(path)))

    def close(self) -> None:
        """Wait for removals, and free the copy. No checkpoint is being written any more."""
        for removal in self._removals:
            removal.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _complete(self, flight: _InFlight) -> None:
        """Collect the entries of all ranks' files and have rank 0 complete the checkpoint."""
        outcome = flight.part if isinstance(flight.part, str) else flight.part.wait()
        if not isinstance(outcome, str):
            size, digest = outcome
            outcome = build_entries(format_part_name(self._world.rank), size, digest, flight.located)
        parts = self._world.gather(outcome)
        failure = next((part for part in parts if isinstance(part, str)), None)
        if failure is not None:
            self._end(flight, failure)
        flight.parts_complete = True
        if self._world.is_main:
            scratch, final = self._checkpoints.scratch(flight.step), self._checkpoints.path(flight.step)
            state = json.dumps(flight.state, indent=1)
            flight.completion = BackgroundTask(lambda: finish(scratch, final, parts, state, flight.recipe))

    def _conclude(self, flight: _InFlight) -> SavedCheckpoint:
        outcome = None if flight.completion is None else flight.completion.wait()
        return self._end(flight, outcome if isinstance(outcome, str) else None)

    def _end(self, flight: _InFlight, failure: str | None) -> SavedCheckpoint:
        self._flight = None
        try:
            self._checkpoints.conclude(self._world, flight.step, failure)
        except CheckpointError:
            self.usable = all(self._world.gather(self._writer is not None and self._writer.usable))
            raise
        return SavedCheckpoint(self._checkpoints.path(flight.step), time.monotonic() - flight.started_at)


class BackgroundChoice:
    """Whether writing in the background is worth it: ``checkpoint.background``, and what is measured for ``auto``."""

    def __init__(self, setting: bool | Literal["auto"], world: World) -> None:
        self._setting, self._world = setting, world
        self._is_worth_it: bool | None = None  # auto; None: not known yet
        self._waits_for_disk = False  # whether writing has mostly waited for the disk

    def is_worth_it(self, own_bytes: int) -> bool:
        """Return whether to write in the background, the same on every rank. ``own_bytes``: of this rank's part."""
        if self._setting != "auto":
            return self._setting
        if self._is_worth_it is None:
            sizes, room = zip(*self._world.gather((own_bytes, self._has_room())), strict=True)
            self._is_worth_it = (
                max(sizes) >= _BACKGROUND_BYTES and all(room) and can_allocate_on_host(self._world, own_bytes)
            )
        return self._is_worth_it

    def written(self, own_bytes: int, computing: float) -> None:
        """Note on every rank whether writing a large checkpoint in front has mostly waited for the disk.

        Args:
            computing: share of the time for which this rank has computed.
        """
        if self._world.device.type == "cpu" and self._setting == "auto":
            largest = max(self._world.gather((own_bytes, computing)))
            self._waits_for_disk = largest[0] >= _BACKGROUND_BYTES and largest[1] < _COMPUTING
            self._is_worth_it = None

    def _has_room(self) -> bool:
        """Return whether writing beside the training takes nothing from it: it runs on a GPU, leaves a core to each
        thread that writes, or writing mostly waits for the disk.
        """
        free_cores = detect().cpu_cores - self._world.local_size * torch.get_num_threads()
        return self._world.device.type != "cpu" or free_cores >= self._world.local_size or self._waits_for_disk
