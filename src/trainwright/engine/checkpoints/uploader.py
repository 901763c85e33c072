"""Copy a run's checkpoints, what else it needs to go on elsewhere, and its model to its stores. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.engine.checkpoints.directories import remove
from trainwright.engine.checkpoints.manifest import CheckpointError, checkpoints_in
from trainwright.engine.checkpoints.remote_store import RemoteStore
from trainwright.engine.checkpoints.stored_run import EVENTS, name_in_stores
from trainwright.engine.checkpoints.upload_state import CheckpointUpload, StoreState
from trainwright.errors import TrainwrightError, writes_to

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
        self._stores = [StoreState(RemoteStore(where, name), checkpoints) for where in urls]
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

    def recovered(self) -> list[str]:
        """Return which places work again since the last call, a line each."""
        with self._changed:
            recovered, self._recovered = self._recovered, []
        return recovered

    def wait(self, stall: float = _STALL_SECONDS) -> None:
        """Wait until everything that was added is copied, or nothing moves for ``stall`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        moved, since = self._moved(), time.monotonic()
        while (thread := self._thread) is not None:
            thread.join(_LOOK_SECONDS)
            if (now := self._moved()) != moved:
                moved, since = now, time.monotonic()
            elif thread.is_alive() and time.monotonic() - since > stall:
                where = ", ".join(state.store.where for state in self._stores)
                self._problems.append(f"checkpoint.copies: {where}: nothing moves; the newest copy is not complete")
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
            if self._waiting is not None and self._waiting.belongs_after(step):
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
            return self._restored(after, open_checkpoint, before)
        finally:  # not before: what is being removed cannot be read
            with self._changed:
                abandoned = [state.abandoned.step for state in self._stores if state.abandoned.step is not None]
                if abandoned and self._thread is None:  # otherwise it is tried before the next copy
                    self._remove_abandoned(min(abandoned))

    def _restored(
        self, after: int | None, open_checkpoint: Callable[[Path], Checkpoint], before: int | None
    ) -> Checkpoint | None:
        for step, name, state in self._newest_first():
            if after is not None and step <= after:
                break
            if before is not None and step >= before:
                continue
            try:
                stored = state.stored(name)
                if stored is not None and not stored.begins(self._run / EVENTS):
                    raise CheckpointError("the run has gone on elsewhere; stop it, and --resume it to go on from there")
                if state.abandoned.has(step, stored):
                    continue
                restore(state.store, name, self._directory)
                return open_checkpoint(self._directory / name)
            except Exception as error:  # of any library of fsspec
                self._problems.append(f"the copy of {name} in {state.store.where} cannot be used: {error}")
        return None

    def _newest_first(self) -> Iterator[tuple[int, str, StoreState]]:
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
                abandoned, self._abandoned = self._abandoned, None
                carried = upload  # what waits was added after the run went back
                if upload is None:
                    upload, self._waiting = self._waiting, None
                if upload is None:
                    upload, self._model = self._model, None
                if upload is None and abandoned is None:
                    self._thread = None
                    return
            if abandoned is not None:
                for state in self._stores:
                    try:
                        state.remove_abandoned()
                    except Exception as error:  # tried again before the next copy
                        self._failed(state, error)
                if carried is not None and carried.belongs_after(abandoned):
                    carried.stores.clear()
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
            if self._abandoned is not None and upload.belongs_after(self._abandoned):
                return False
        try:
            state.remove_abandoned()
            if upload.is_model:
                state.copy_model(upload)
            else:
                state.copy(upload, {*checkpoints_in(self._directory), upload.step})
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
    with writes_to(checkpoints):
        checkpoints.mkdir(exist_ok=True)
        remove(scratch)
    try:
        store.read(name, scratch)
    except BaseException:
        remove(scratch)
        raise
    with writes_to(checkpoints):
        if final.exists() or final.is_symlink():
            final.rename(old := final.with_name(f".removing-{name}"))
            remove(old)
        scratch.rename(final)
