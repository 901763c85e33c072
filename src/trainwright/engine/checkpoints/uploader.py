"""Copy a run's checkpoints, what else it needs to go on elsewhere, and its model to its stores. Imports no torch."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trainwright.engine.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    compute_checksum,
    list_checkpoints,
    remove,
    step_of,
)
from trainwright.engine.checkpoints.remote_store import (
    EVENTS,
    PLAN,
    RECIPE,
    EventParts,
    Files,
    Part,
    RemoteStore,
    StoredRun,
    name_in_stores,
    read_identity,
)
from trainwright.errors import TrainwrightError, convert_write_errors
from trainwright.utils.paths import write_file

if TYPE_CHECKING:
    from trainwright.engine.checkpoints.checkpoint import Checkpoint


_LONGEST_PAUSE = 60.0  # seconds before a copy that failed is tried again; the first pause is a second
_LAST_TRIES = 3  # of the last copy, once the run ends
_STALL_SECONDS = 60.0  # without a byte, after which the end of a run no longer waits for its last copy
_LOOK_SECONDS = 0.1


class Copies:
    """Copy the checkpoints of a run, one at a time, while training goes on, and then its model. Only rank 0 has one.

    A copy that fails is tried again, until a newer checkpoint takes its place; this is told once for each place.

    Args:
        urls: values of ``checkpoint.copies``.
        checkpoints: directory of the run's checkpoints. What is no longer there is removed from the places too.

    Raises:
        RequestError: see ``RemoteStore``.
    """

    def __init__(self, urls: Sequence[str], checkpoints: Path) -> None:
        self._directory, self._run = checkpoints, checkpoints.parent
        name = name_in_stores(self._run) if urls else ""
        self._stores = [StoreState(RemoteStore(url, name), checkpoints) for url in urls]
        self.seconds: float | None = None  # how long the newest complete copy has taken
        self._problems: list[str] = []
        self._recovered: list[str] = []
        self._waiting: CheckpointUpload | None = None
        self._model: CheckpointUpload | None = None  # waits until the last checkpoint is copied
        self._abandoned: int | None = None  # copies of this step and later ones are to be removed now
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint once the one that is being copied is; a newer one takes its place until then."""
        if not self._stores:
            return
        upload = CheckpointUpload.of(checkpoint, self._stores)
        with self._changed:
            if self._waiting is not None:
                self._waiting.stack.close()
            self._waiting = upload
            self._wake()

    def add_model(self, final: Path) -> None:
        """Copy the trained model, a directory ``final``, after the last checkpoint."""
        if not self._stores:
            return
        upload = CheckpointUpload.of(final, self._stores)
        with self._changed:
            self._model = upload
            self._wake()

    def problems(self) -> list[str]:
        """Return what has failed since the last call."""
        with self._changed:
            problems, self._problems = self._problems, []
        return problems

    def take_recovered(self) -> list[str]:
        """Return which places work again since the last call, a line each."""
        with self._changed:
            lines, self._recovered = self._recovered, []
        return lines

    def wait(self, stall: float = _STALL_SECONDS) -> None:
        """Wait until everything that was added is copied, or nothing moves for ``stall`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        moved_bytes, since = self._moved(), time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(_LOOK_SECONDS)
            if (now := self._moved()) != moved_bytes:
                moved_bytes, since = now, time.monotonic()
            elif thread.is_alive() and time.monotonic() - since > stall:
                locations = ", ".join(state.store.where for state in self._stores)
                self._problems.append(f"checkpoint.copies: {locations}: nothing moves; the newest copy is not complete")
                return
        self._closing = False
        for state in (state for state in self._stores if state.abandoned.step is not None):
            self._problems.append(
                f"checkpoint.copies: {state.store.where}: copies of this run from step {state.abandoned.step} on, "
                "before which it went back, may still be there; they are removed when the run is resumed here; do not "
                "resume it on another machine before"
            )

    def remove_from(self, step: int) -> None:
        """Remove the copies of ``step`` and later ones: the run goes back to before it."""
        if not self._stores:
            return
        with self._changed:
            if self._waiting is not None and self._waiting.is_at_or_after(step):
                self._waiting.stack.close()
                self._waiting = None
            for state in self._stores:
                state.abandoned.add(step)
            self._remove_abandoned(step)

    def newest(
        self, after: int | None, open_checkpoint: Callable[[Path], Checkpoint], before: int | None = None
    ) -> Checkpoint | None:
        """Return the newest copy that verifies, restored to the run; None if none is of a later step than ``after``.

        Copies of step ``before`` and later ones are passed over, and those that are abandoned, which are removed.
        """
        try:
            return self._restore_newest(after, open_checkpoint, before)
        finally:  # not before: what is being removed cannot be read
            with self._changed:
                abandoned_steps = [state.abandoned.step for state in self._stores if state.abandoned.step is not None]
                if abandoned_steps and self._thread is None:  # otherwise it is tried before the next copy
                    self._remove_abandoned(min(abandoned_steps))

    def _restore_newest(
        self, after: int | None, open_checkpoint: Callable[[Path], Checkpoint], before: int | None
    ) -> Checkpoint | None:
        for step, name, state in self._iterate_newest_first():
            if after is not None and step <= after:
                break
            if before is not None and step >= before:
                continue
            try:
                stored_run = state.read_record(name)
                if stored_run is not None and not stored_run.begins(self._run / EVENTS):
                    raise CheckpointError("the run has gone on elsewhere; stop it, and --resume it to go on from there")
                if state.abandoned.has(step, stored_run):
                    continue
                restore(state.store, name, self._directory)
                return open_checkpoint(self._directory / name)
            except Exception as error:  # of any library of fsspec
                self._problems.append(f"the copy of {name} in {state.store.where} cannot be used: {error}")
        return None

    def _iterate_newest_first(self) -> Iterator[tuple[int, str, StoreState]]:
        checkpoints: list[tuple[int, str, StoreState]] = []
        for state in self._stores:
            try:
                checkpoints.extend((step, name, state) for step, name in state.store.steps().items())
            except Exception as error:
                self._failed(state, error)
        return iter(sorted(checkpoints, key=lambda checkpoint: -checkpoint[0]))

    def _remove_abandoned(self, step: int) -> None:
        """Have the thread remove what is abandoned. Call it with the lock."""
        self._abandoned = step if self._abandoned is None else min(step, self._abandoned)
        self._wake()

    def _wake(self) -> None:
        """Have the thread look for work. Call it with the lock."""
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        upload: CheckpointUpload | None = None
        while True:
            with self._changed:
                if upload is not None and not self._should_retry(upload):
                    if self._waiting is None:
                        self._report_incomplete(upload)
                    upload.stack.close()
                    upload = None
                abandoned_step, self._abandoned = self._abandoned, None
                checkpoint_upload = upload  # what waits was added after the run went back
                if upload is None:
                    upload, self._waiting = self._waiting, None
                if upload is None:
                    upload, self._model = self._model, None
                if upload is None and abandoned_step is None:
                    self._thread = None
                    return
            if abandoned_step is not None:
                for state in self._stores:
                    try:
                        state.remove_abandoned()
                    except Exception as error:  # tried again before the next copy
                        self._failed(state, error)
                if checkpoint_upload is not None and checkpoint_upload.is_at_or_after(abandoned_step):
                    checkpoint_upload.stores.clear()
            if upload is not None:
                upload.stores[:] = [state for state in upload.stores if not self._copied(state, upload)]
                upload.tries += 1
                upload.last_tries += self._closing
                if not upload.stores:
                    upload.stack.close()
                    upload = None

    def _should_retry(self, upload: CheckpointUpload) -> bool:
        """Wait before a copy is tried again; return whether to. Call it with the lock."""
        closing = self._closing
        pause = 1.0 if closing else min(2.0 ** (upload.tries - 1), _LONGEST_PAUSE)
        self._changed.wait_for(
            lambda: self._waiting is not None or self._abandoned is not None or self._closing != closing, pause
        )
        return self._waiting is None and not (self._closing and upload.last_tries >= _LAST_TRIES)

    def _report_incomplete(self, upload: CheckpointUpload) -> None:
        """Say where the last copy is not complete, also if the place was told to fail before. Call it with the lock."""
        for state in upload.stores:
            self._problems.append(
                f"checkpoint.copies: {state.store.where}: {upload.path.name} is not complete there; copy it yourself "
                f"from {upload.path}"
            )

    def _copied(self, state: StoreState, upload: CheckpointUpload) -> bool:
        started_at = time.monotonic()
        with self._changed:
            if self._abandoned is not None and upload.is_at_or_after(self._abandoned):
                return False
        try:
            state.remove_abandoned()
            if upload.is_model:
                state.copy_model(upload)
            else:
                state.copy(upload, {*list_checkpoints(self._directory), upload.step})
        except Exception as error:  # of any library of fsspec; training goes on
            self._failed(state, error)
            return False
        if not upload.is_model:
            self.seconds = time.monotonic() - started_at
        if state.failing:
            state.failing = False
            with self._changed:
                self._recovered.append(
                    f"checkpoint.copies: {state.store.where} can be written again: {upload.path.name}"
                )
        return True

    def _failed(self, state: StoreState, error: Exception) -> None:
        try:
            with state.store.in_words():
                raise error
        except TrainwrightError as words:
            problem = str(words) if str(words).startswith("checkpoint.copies") else f"{state.store.where}: {words}"
        with self._changed:
            if not state.failing:
                self._problems.append(f"{problem}; training goes on, and copying is tried again")
            state.failing = True

    def _moved(self) -> int:
        return sum(state.store.moved for state in self._stores)


def restore(store: RemoteStore, name: str, checkpoints: Path) -> None:
    """Read checkpoint ``name`` from a place into the directory of a run's checkpoints.

    Raises:
        CheckpointError: it is incomplete or damaged.
        RequestError, MachineError: ``checkpoints`` cannot be written.
        Exception: the place cannot be read; whatever its library raises.
    """
    scratch, final = checkpoints / f".state-{name}", checkpoints / name
    with convert_write_errors(checkpoints):
        checkpoints.mkdir(exist_ok=True)
        remove(scratch)
    try:
        store.read(name, scratch)
    except BaseException:
        remove(scratch)
        raise
    with convert_write_errors(checkpoints):
        if final.exists() or final.is_symlink():
            final.rename(old := final.with_name(f".removing-{name}"))
            remove(old)
        scratch.rename(final)


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

    def is_at_or_after(self, step: int) -> bool:
        """Return whether it is a checkpoint of ``step`` or a later one."""
        return not self.is_model and self.step >= step

    @cached_property
    def digests(self) -> dict[str, dict[str, int | str]]:
        """Size and SHA-256 of every file of the model."""
        return {name: _compute_file_record(file) for name, file in self.files}


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
        self.step: int | None = _read_abandoned(self._file).get(self._root)

    def add(self, step: int) -> None:
        """Abandon the copies of ``step`` and later ones."""
        with _abandoning:
            self.step = step if self.step is None else min(step, self.step)
            self._write(self.step)

    def note_removal(self, step: int) -> None:
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
        steps = _read_abandoned(self._file)
        new_steps = {name: value for name, value in steps.items() if name != self._root}
        if step is not None:
            new_steps[self._root] = step
        if new_steps == steps:
            return
        with suppress(OSError):  # this launch knows it in any case
            if new_steps:
                write_file(self._file, json.dumps(new_steps))
            else:
                self._file.unlink()


def forget_abandoned(checkpoints: Path) -> None:
    """Forget what is abandoned, as the run goes on with the events of another machine. Raises OSError."""
    (checkpoints / _ABANDONED).unlink(missing_ok=True)


def _read_abandoned(file: Path) -> dict[str, int]:
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
        known_parts = self._read_known_parts()
        sums = _compute_sums(upload)
        parts: list[tuple[Part, ...]] = []

        def record() -> str:
            parts.append(self.events.write())
            recipe, plan = ((self.run / name).read_text(encoding="utf-8") for name in (RECIPE, PLAN))
            return StoredRun(read_identity(self.run), recipe, plan, parts[-1]).text()

        self.store.write(upload.path.name, upload.files, sums, record)
        known_parts[upload.path.name] = parts[-1]
        by_step = {step: name for step, name in self.store.steps().items() if step not in retained}
        self.remove({name for step, name in by_step.items() if step < upload.step or not self.store.is_complete(name)})

    def copy_model(self, upload: CheckpointUpload) -> None:
        """Write the model, unless the same is there. Raises what the place raises."""
        self._read_known_parts()
        manifest = json.dumps({"files": upload.digests}, indent=1).encode()
        if self.store.manifest(FINAL) == manifest:
            return
        self.store.remove([FINAL])  # an earlier one may have had other files
        sums = {name: (int(digest["size"]), str(digest["sha256"])) for name, digest in upload.digests.items()}
        self.store.write(FINAL, [*upload.files, (MANIFEST, io.BytesIO(manifest))], sums)

    def remove(self, names: set[str]) -> None:
        """Remove checkpoints, and the parts of the events that no other one refers to. Raises what the place raises."""
        known_parts = self._read_known_parts()
        self.store.remove(sorted(names))
        for name in names:
            known_parts.pop(name, None)
        needed_names = {part.name for parts in known_parts.values() for part in parts}
        for part in set(self.store.parts()) - needed_names:
            self.store.remove_part(part)

    def remove_abandoned(self) -> None:
        """Remove what is abandoned, if that has not been done. Raises what the place raises."""
        step = self.abandoned.step
        if step is None:
            return
        names = self.store.steps()
        self.remove({names[k] for k in names if k >= step and self.abandoned.has(k, self.read_record(names[k]))})
        self.abandoned.note_removal(step)

    def read_record(self, name: str) -> StoredRun | None:
        """Return the record of a checkpoint; None if it is not whole. Raises CheckpointError if it is another run's."""
        try:
            stored_run = StoredRun.of(self.store, name)
        except CheckpointError:
            return None
        if stored_run is not None and stored_run.run != read_identity(self.run):
            raise CheckpointError(f"it has copies of another run of this name ({name}); nothing is copied there")
        return stored_run

    def _read_known_parts(self) -> dict[str, tuple[Part, ...]]:
        """Return the parts of the events by checkpoint. Raises CheckpointError if any is another run's.

        Another run may have begun with the same name since the last call, so new checkpoints are looked at each time.
        """
        names = set(self.store.steps().values())
        if self.known is not None:
            for name in names - self.known.keys():
                if (stored_run := self.read_record(name)) is not None:
                    self.known[name] = stored_run.events
            return self.known
        events: dict[str, tuple[Part, ...]] = {}
        self.events = EventParts(self.run, self.store)
        for name in sorted(names, reverse=True):
            if (stored_run := self.read_record(name)) is None:
                continue  # it is replaced or removed like any other
            if not events:
                self.events.take_over(stored_run)
            events[name] = stored_run.events
        self.known = events
        return events


def _compute_file_record(file: BinaryIO) -> dict[str, int | str]:
    file.seek(0)
    size, digest = compute_checksum(file)
    return {"size": size, "sha256": digest}


def _compute_sums(upload: CheckpointUpload) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of the files of a checkpoint, which the run may have removed meanwhile."""
    manifest = next(file for name, file in upload.files if name == MANIFEST)
    manifest.seek(0)
    files = json.load(manifest)["files"]
    return {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
