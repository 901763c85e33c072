"""Copies of a run's checkpoints in other directories or buckets. Imports no torch.

A place is a directory or a URL of fsspec, such as ``s3://bucket/checkpoints``. Below it is a directory for each run,
named like the run's own, with a directory for each checkpoint. The manifest, which has the SHA-256 of every file, is
written last: a copy without one is not complete.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainwright.engine.checkpoints.directories import remove
from trainwright.engine.checkpoints.manifest import MANIFEST, CheckpointError, Manifest, checkpoints_in
from trainwright.errors import RequestError
from trainwright.paths import user_path

if TYPE_CHECKING:
    from trainwright.engine.checkpoints.checkpoint import Checkpoint

_STEP = re.compile(r"step-([0-9]{8,})")
_PIECE = 8 * 2**20
Files = Sequence[tuple[str, BinaryIO]]


class Place:
    """Where copies of a run's checkpoints are.

    Args:
        where: a directory or a URL, of ``checkpoint.copies``.
        run: name of the run.

    Raises:
        RequestError: fsspec does not know the URL, or a library for it is missing.
    """

    def __init__(self, where: str, run: str) -> None:
        import fsspec

        self.where = where
        try:
            filesystem, root = fsspec.url_to_fs(where if "://" in where else str(user_path(where).absolute()))
        except (ValueError, ImportError) as error:
            raise RequestError(f"checkpoint.copies: {where} cannot be opened: {error}") from error
        self._files: Any = filesystem
        self._root = f"{root.rstrip('/')}/{run}"

    def write(self, name: str, files: Files) -> None:
        """Write the files of checkpoint ``name``, the manifest last. Raises OSError."""
        target = f"{self._root}/{name}"
        self._files.makedirs(target, exist_ok=True)
        if self._files.exists(f"{target}/{MANIFEST}"):
            self._files.rm_file(f"{target}/{MANIFEST}")
        for each, source in sorted(files, key=lambda file: file[0] == MANIFEST):
            source.seek(0)
            with self._files.open(f"{target}/{each}", "wb") as file:
                shutil.copyfileobj(source, file, _PIECE)

    def steps(self) -> dict[int, str]:
        """Return the names of the checkpoints here by step, complete or not. Raises OSError."""
        self._files.invalidate_cache()
        if not self._files.isdir(self._root):
            return {}
        names = [str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        return {int(found[1]): name for name in names if (found := _STEP.fullmatch(name))}

    def read(self, name: str, into: Path) -> None:
        """Read checkpoint ``name`` into the new directory ``into``. Raises OSError or CheckpointError."""
        into.mkdir(parents=True)
        self._fetch(name, MANIFEST, into)
        for file in Manifest.read(into).files:  # names without directories
            self._fetch(name, file, into)

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints. Raises OSError."""
        for name in names:
            self._files.rm(f"{self._root}/{name}", recursive=True)

    def _fetch(self, name: str, file: str, into: Path) -> None:
        with self._files.open(f"{self._root}/{name}/{file}", "rb") as source, (into / file).open("wb") as target:
            shutil.copyfileobj(source, target, _PIECE)


class Copies:
    """Copy the checkpoints of a run, one at a time, while training goes on. Only rank 0 has one.

    Args:
        places: values of ``checkpoint.copies``.
        checkpoints: directory of the run's checkpoints. What is no longer there is removed from the places too.

    Raises:
        RequestError: see ``Place``.
    """

    def __init__(self, places: Sequence[str], checkpoints: Path) -> None:
        self._directory = checkpoints
        self._places = [Place(where, checkpoints.absolute().parent.name) for where in places]
        self._problems: list[str] = []
        self._waiting: tuple[str, ExitStack, Files] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint once the one that is being copied is; a newer one takes its place until then."""
        if not self._places:
            return
        stack = ExitStack()  # files that are open stay readable if the checkpoint is removed
        files = [(file.name, stack.enter_context(file.open("rb"))) for file in sorted(checkpoint.iterdir())]
        with self._lock:
            if self._waiting is not None:
                self._waiting[1].close()
            self._waiting = checkpoint.name, stack, files
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
                self._thread.start()

    def problems(self) -> list[str]:
        """Return what has failed since the last call."""
        with self._lock:
            found, self._problems = self._problems, []
        return found

    def wait(self) -> None:
        """Wait until every checkpoint that was added is copied."""
        while (thread := self._thread) is not None:
            thread.join()

    def remove_from(self, step: int) -> None:
        """Remove the copies of ``step`` and later ones, which belong to a course that the run has left."""
        self.wait()
        for place in self._places:
            self._try(place, partial(_remove_from, place, step))

    def newest(self, after: int | None, open_checkpoint: Callable[[Path], Checkpoint]) -> Checkpoint | None:
        """Return the newest copy that verifies, if it is of a later step than ``after``, restored to the run."""
        for step, name, place in self._newest_first():
            if after is not None and step <= after:
                break
            found = self._restored(name, place, open_checkpoint)
            if found is not None:
                return found
        return None

    def _newest_first(self) -> Iterator[tuple[int, str, Place]]:
        found: list[tuple[int, str, Place]] = []
        for place in self._places:
            self._try(place, partial(_note, place, found))
        return iter(sorted(found, key=lambda each: -each[0]))

    def _restored(self, name: str, place: Place, open_checkpoint: Callable[[Path], Checkpoint]) -> Checkpoint | None:
        scratch, final = self._directory / f".writing-{name}", self._directory / name
        remove(scratch)
        try:
            place.read(name, scratch)
            open_checkpoint(scratch)
        except (OSError, CheckpointError) as error:
            remove(scratch)
            self._problems.append(f"the copy of {name} in {place.where} cannot be used: {error}")
            return None
        if final.exists() or final.is_symlink():
            final.rename(old := final.with_name(f".removing-{name}"))
            remove(old)
        scratch.rename(final)
        return open_checkpoint(final)

    def _run(self) -> None:
        while True:
            with self._lock:
                work, self._waiting = self._waiting, None
                if work is None:
                    self._thread = None
                    return
            name, stack, files = work
            with stack:
                for place in self._places:
                    self._try(place, partial(self._copied, place, name, files))

    def _copied(self, place: Place, name: str, files: Files) -> None:
        place.write(name, files)
        kept = {*checkpoints_in(self._directory), int(name.rpartition("-")[2])}
        place.remove([old for step, old in place.steps().items() if step not in kept])

    def _try(self, place: Place, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of any library of fsspec; training goes on
            with self._lock:
                self._problems.append(f"checkpoint.copies: {place.where}: {error}")


def _remove_from(place: Place, step: int) -> None:
    place.remove([name for other, name in place.steps().items() if other >= step])


def _note(place: Place, found: list[tuple[int, str, Place]]) -> None:
    found.extend((step, name, place) for step, name in place.steps().items())
