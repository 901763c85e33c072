"""What is copied to the stores of a run, and what is known to be in each. Imports no torch."""

from __future__ import annotations

import io
import json
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from trainwright.engine.checkpoints.directories import checksum
from trainwright.engine.checkpoints.manifest import MANIFEST, CheckpointError, step_of
from trainwright.engine.checkpoints.remote_store import Files, RemoteStore
from trainwright.engine.checkpoints.stored_run import EVENTS, PLAN, RECIPE, EventParts, Part, StoredRun, identity_of
from trainwright.utils.paths import write_file

FINAL = "final"
_ABANDONED = ".abandoned"  # in the directory of checkpoints: the step of every place by its root
_abandoning = threading.Lock()


@dataclass
class CheckpointUpload:
    """A checkpoint or the model to copy; its files are open, so they stay readable if they are removed."""

    path: Path
    stack: ExitStack
    files: Files
    stores: list[StoreState]
    tries: int = 0
    last_tries: int = 0  # those that failed while the end of the run waited

    @classmethod
    def of(cls, path: Path, stores: list[StoreState]) -> CheckpointUpload:
        """Open the files below ``path``, a complete checkpoint or the model. Raises OSError."""
        stack = ExitStack()
        paths = sorted(file for file in path.rglob("*") if file.is_file())
        files = [(file.relative_to(path).as_posix(), stack.enter_context(file.open("rb"))) for file in paths]
        return cls(path, stack, files, list(stores))

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return step_of(self.path.name)

    @property
    def is_model(self) -> bool:
        """Whether it is the model and no checkpoint."""
        return self.path.name == FINAL

    def belongs_after(self, step: int) -> bool:
        """Return whether it is a checkpoint of ``step`` or a later one."""
        return not self.is_model and self.step >= step

    @cached_property
    def digests(self) -> dict[str, dict[str, int | str]]:
        """Size and SHA-256 of every file of the model."""
        return {name: _measured(file) for name, file in self.files}


class Abandoned:
    """The copies in one place that a run has abandoned.

    The place may not be reachable when the run goes back, and this process may end before it is. So a file says what
    is to be removed, until that is done: a later launch must not resume from these copies.

    Args:
        checkpoints: directory of the run's checkpoints.

    Attributes:
        step: copies of this step and later ones are abandoned, as far as this run has written them; None: nothing is.
    """

    def __init__(self, checkpoints: Path, store: RemoteStore) -> None:
        self._file, self._root, self._events = checkpoints / _ABANDONED, store.root, checkpoints.parent / EVENTS
        self.step: int | None = _abandoned_in(self._file).get(self._root)

    def add(self, step: int) -> None:
        """Abandon the copies of ``step`` and later ones."""
        with _abandoning:
            self.step = step if self.step is None else min(step, self.step)
            self._write(self.step)

    def removed(self, step: int) -> None:
        """Report that the copies of ``step`` and later ones have been removed."""
        with _abandoning:
            if self.step == step:
                self.step = None
                self._write(None)

    def has(self, step: int, stored: StoredRun | None) -> bool:
        """Return whether the copy of ``step`` is abandoned. Raises OSError.

        A copy of another machine, which the run has gone on with from there, is not: it has other events.
        """
        return self.step is not None and step >= self.step and (stored is None or stored.begins(self._events))

    def _write(self, step: int | None) -> None:
        steps = _abandoned_in(self._file)
        changed = {name: value for name, value in steps.items() if name != self._root}
        if step is not None:
            changed[self._root] = step
        if changed == steps:
            return
        with suppress(OSError):  # this launch knows it in any case
            if changed:
                write_file(self._file, json.dumps(changed))
            else:
                self._file.unlink()


def forget_abandoned(checkpoints: Path) -> None:
    """Forget what is abandoned, as the run goes on with the events of another machine. Raises OSError."""
    (checkpoints / _ABANDONED).unlink(missing_ok=True)


def _abandoned_in(file: Path) -> dict[str, int]:
    try:
        return {str(root): int(step) for root, step in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@dataclass
class StoreState:
    """A place, with what is known to be in it."""

    store: RemoteStore
    checkpoints: Path
    abandoned: Abandoned = field(init=False)
    events: EventParts = field(init=False)
    known: dict[str, tuple[Part, ...]] | None = None  # parts of the events by checkpoint; None: not looked yet
    failing: bool = False

    def __post_init__(self) -> None:
        self.abandoned = Abandoned(self.checkpoints, self.store)

    @property
    def run(self) -> Path:
        """The directory of the run."""
        return self.checkpoints.parent

    def copy(self, upload: CheckpointUpload, retained: set[int]) -> None:
        """Write a checkpoint, and remove earlier ones of other steps than ``retained``. Raises what the place raises.

        Later ones stay if they are complete: the run has gone on elsewhere, and this machine is behind.
        """
        known = self._known_here()
        sums = _sums(upload)
        parts: list[tuple[Part, ...]] = []

        def record() -> str:
            parts.append(self.events.write())
            recipe, plan = ((self.run / name).read_text(encoding="utf-8") for name in (RECIPE, PLAN))
            return StoredRun(identity_of(self.run), recipe, plan, parts[-1]).text()

        self.store.write(upload.path.name, upload.files, sums, record)
        known[upload.path.name] = parts[-1]
        others = {step: name for step, name in self.store.steps().items() if step not in retained}
        self.remove({name for step, name in others.items() if step < upload.step or not self.store.is_complete(name)})

    def copy_model(self, upload: CheckpointUpload) -> None:
        """Write the model, unless the same is there. Raises what the place raises."""
        self._known_here()
        manifest = json.dumps({"files": upload.digests}, indent=1).encode()
        if self.store.manifest(FINAL) == manifest:
            return
        self.store.remove([FINAL])  # an earlier one may have had other files
        sums = {name: (int(stated["size"]), str(stated["sha256"])) for name, stated in upload.digests.items()}
        self.store.write(FINAL, [*upload.files, (MANIFEST, io.BytesIO(manifest))], sums)

    def remove(self, names: set[str]) -> None:
        """Remove checkpoints, and the parts of the events that no other one refers to. Raises what the place raises."""
        known = self._known_here()
        self.store.remove(sorted(names))
        for name in names:
            known.pop(name, None)
        needed = {part.name for parts in known.values() for part in parts}
        for part in set(self.store.parts()) - needed:
            self.store.remove_part(part)

    def remove_abandoned(self) -> None:
        """Remove what is abandoned, if that has not been done. Raises what the place raises."""
        step = self.abandoned.step
        if step is None:
            return
        names = self.store.steps()
        self.remove({names[k] for k in names if k >= step and self.abandoned.has(k, self.stored(names[k]))})
        self.abandoned.removed(step)

    def stored(self, name: str) -> StoredRun | None:
        """Return the record of a checkpoint; None if it is not whole. Raises CheckpointError if it is another run's."""
        try:
            stored = StoredRun.of(self.store, name)
        except CheckpointError:
            return None
        if stored is not None and stored.run != identity_of(self.run):
            raise CheckpointError(f"it has copies of another run of this name ({name}); nothing is copied there")
        return stored

    def _known_here(self) -> dict[str, tuple[Part, ...]]:
        """Return the parts of the events by checkpoint. Raises CheckpointError if any is another run's.

        Another run may have begun with the same name since the last call, so new checkpoints are looked at each time.
        """
        names = set(self.store.steps().values())
        if self.known is not None:
            for name in names - self.known.keys():
                if (stored := self.stored(name)) is not None:
                    self.known[name] = stored.events
            return self.known
        events: dict[str, tuple[Part, ...]] = {}
        self.events = EventParts(self.run, self.store)
        for name in sorted(names, reverse=True):
            if (stored := self.stored(name)) is None:
                continue  # it is replaced or removed like any other
            if not events:
                self.events.take_over(stored)
            events[name] = stored.events
        self.known = events
        return events


def _measured(file: BinaryIO) -> dict[str, int | str]:
    file.seek(0)
    size, digest = checksum(file)
    return {"size": size, "sha256": digest}


def _sums(upload: CheckpointUpload) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of the files of a checkpoint, which the run may have removed meanwhile."""
    manifest = next(file for name, file in upload.files if name == MANIFEST)
    manifest.seek(0)
    files = json.load(manifest)["files"]
    return {name: (int(stated["size"]), str(stated["sha256"])) for name, stated in files.items()}
