"""Where copies of a run are: a directory, or what a URL of fsspec names, such as a bucket. Imports no torch.

    <store>/<run>/
      step-00000040/  the files of a checkpoint, then run.json (stored_run.py), then manifest.json
      events/         parts of events.jsonl, which the run.json of each checkpoint refers to
      final/          the files of the trained model, then manifest.json
      attempts.json   how often a job was started again without a new checkpoint, where a cluster counts that

A manifest, which has the SHA-256 of every file, is written last: a copy without one is not complete.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from trainwright.engine.checkpoints.manifest import MANIFEST, CheckpointError, Manifest
from trainwright.errors import MachineError, RequestError, TrainwrightError, writes_to
from trainwright.utils.installation import install_command
from trainwright.utils.paths import user_path

RUN, EVENTS, ATTEMPTS = "run.json", "events", "attempts.json"
_STEP = re.compile(r"step-([0-9]{8,})")
_PIECE = 4 * 2**20
_MAX_PARTS = 9_000  # of an upload in parts: stores accept 10,000
_LEAST_PART = 8 * 2**20
_RUN_BYTES = 64 * 2**20  # no run.json is larger
# Their first name is a bucket, which has to exist: making directories would create one under a wrong name.
_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_SECRETS = re.compile(r"(?i)(^|[_-]|[a-z])(sig|signature|token|secret|password|key|credential)s?$")
Files = Sequence[tuple[str, BinaryIO]]


class RemoteStore:
    """Where the copies of a run are.

    Args:
        where: a directory or a URL.
        run: name of the run.
        key: the recipe's key or the option that names the place, for messages.

    Raises:
        RequestError: fsspec does not know the URL, a library for it is missing, or it has a secret in it.
    """

    def __init__(self, where: str, run: str, key: str = "checkpoint.copies") -> None:
        import fsspec

        _refuse_secrets(where, key)
        self.where, self._key = where, key
        protocol = where.partition("://")[0] if "://" in where else "file"
        try:
            filesystem, root = fsspec.url_to_fs(where if "://" in where else str(user_path(where).absolute()))
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            fix = install_command(extra) if extra else "install it"
            raise RequestError(f"{key}: {where} needs a library that is not installed ({error}); {fix}") from error
        except ValueError as error:
            raise RequestError(f"{key}: {where} cannot be opened: {error}; correct the URL") from error
        except Exception as error:  # of any library of fsspec, which may connect here
            raise self._in_words(error) from error
        self._files: Any = filesystem
        self._has_buckets = protocol in _BUCKETS
        self.root = f"{root.rstrip('/')}/{run}".rstrip("/")  # as fsspec names it
        # How many bytes have been written or read; it shows whether anything still moves.
        self.moved = 0

    def check(self) -> None:
        """Write a small file and remove it.

        Raises:
            RequestError: the bucket does not exist, or may not be written with these keys.
            MachineError: it cannot be reached or written.
        """
        probe = f"{self.root}/.probe-{secrets.token_hex(4)}"
        created = False
        with self.in_words():
            try:
                created = not self._has_buckets and not self._is_there(self.root)
                self._make(self.root)
                with self._files.open(probe, "wb") as file:
                    file.write(b"trainwright")
                self._files.rm_file(probe)
            finally:
                if created:
                    with suppress(Exception):
                        self._files.rmdir(self.root)

    @contextmanager
    def in_words(self, unusable: type[TrainwrightError] = MachineError) -> Iterator[None]:
        """Raise errors of the library for the place as a RequestError or, if it cannot be used now, as ``unusable``."""
        try:
            yield
        except TrainwrightError:
            raise
        except Exception as error:
            raise self._in_words(error, unusable) from error

    def steps(self) -> dict[int, str]:
        """Return the names of the checkpoints here by step, complete or not."""
        return {int(match[1]): name for name in self._names("") if (match := _STEP.fullmatch(name))}

    def write(
        self, name: str, files: Files, sums: Mapping[str, tuple[int, str]], run: Callable[[], str] | None = None
    ) -> None:
        """Write the files of checkpoint ``name``, or of the model, the manifest last.

        Args:
            files: all of its files.
            sums: size and SHA-256 of each but the manifest.
            run: returns the content of run.json, if there is one; called when the other files are written.

        Raises:
            CheckpointError: a file differs from its checksum.
        """
        target = f"{self.root}/{name}"
        self._make(target)
        if self._is_there(f"{target}/{MANIFEST}"):
            self._files.rm_file(f"{target}/{MANIFEST}")
        for file_name, source in (file for file in files if file[0] != MANIFEST):
            self._make(f"{target}/{file_name}".rpartition("/")[0])
            size = self._upload(f"{name}/{file_name}", _Pieces(source))
            if size != sums[file_name]:
                raise CheckpointError(f"{file_name} of {name} is damaged (size or checksum differs); it is not copied")
            self._check_size(f"{target}/{file_name}", size[0])
        if run is not None:
            self._upload(f"{name}/{RUN}", [run().encode()])
        for _, source in (file for file in files if file[0] == MANIFEST):
            self._upload(f"{name}/{MANIFEST}", _Pieces(source))

    def is_complete(self, name: str) -> bool:
        """Return whether checkpoint ``name`` has its manifest here."""
        return self._is_there(f"{self.root}/{name}/{MANIFEST}")

    def read(self, name: str, into: Path) -> None:
        """Read checkpoint ``name`` into the new directory ``into``, and compare it with its checksums.

        Raises:
            CheckpointError: it is incomplete or damaged.
            RequestError, MachineError: ``into`` cannot be written.
        """
        with writes_to(into):
            into.mkdir(parents=True)
        try:
            self._fetch(f"{name}/{MANIFEST}", into / MANIFEST)
            for file, expected in Manifest.read(into).files.items():  # names without directories
                if self._fetch(f"{name}/{file}", into / file) != expected:
                    raise CheckpointError(f"{file} is damaged (size or checksum differs)")
        except FileNotFoundError as error:
            raise CheckpointError(f"it is incomplete: {error}") from error

    def read_run(self, name: str) -> str:
        """Return the content of run.json of checkpoint ``name``. Raises FileNotFoundError."""
        with self._files.open(f"{self.root}/{name}/{RUN}", "rb") as file:
            return bytes(file.read(_RUN_BYTES)).decode()

    def read_attempts(self) -> str | None:
        """Return what `write_attempts` has written last; None if nothing."""
        content = self._content(ATTEMPTS)
        return None if content is None else content.decode()

    def write_attempts(self, text: str) -> None:
        """Write what is known of the attempts at the run."""
        self._make(self.root)
        self._upload(ATTEMPTS, [text.encode()])

    def manifest(self, name: str) -> bytes | None:
        """Return the manifest of checkpoint ``name``, or of the model; None if it is not complete here."""
        return self._content(f"{name}/{MANIFEST}")

    def _content(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(f"{self.root}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_part(self, part: str, pieces: Iterable[bytes]) -> None:
        """Write a part of the events."""
        self._make(f"{self.root}/{EVENTS}")
        self._upload(f"{EVENTS}/{part}", pieces)

    def read_part(self, part: str, target: FileIO) -> str:
        """Append a part of the events to an unbuffered file; return its SHA-256."""
        return self._copy(f"{EVENTS}/{part}", target)[1]

    def parts(self) -> list[str]:
        """Return the names of the parts of the events here."""
        return self._names(f"/{EVENTS}")

    def remove_part(self, part: str) -> None:
        """Remove a part of the events."""
        self._files.rm_file(f"{self.root}/{EVENTS}/{part}")

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints or the model, each one's manifest first."""
        for name in names:
            if self.is_complete(name):
                self._files.rm_file(f"{self.root}/{name}/{MANIFEST}")
            self._remove_directory(f"{self.root}/{name}")

    def _remove_directory(self, path: str) -> None:
        """Remove a directory by the names of its files: ``rm`` of fsspec takes ``?``, ``*`` and ``[`` as patterns."""
        self._files.invalidate_cache()
        entries = {path: {"type": "directory"}, **self._files.find(path, withdirs=True, detail=True)}
        for entry, info in sorted(entries.items(), reverse=True):  # what is in a directory before it
            if info.get("type") != "directory":
                self._files.rm_file(entry)
            elif not self._has_buckets:
                with suppress(FileNotFoundError):
                    self._files.rmdir(entry)

    def _names(self, below: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(f"{self.root}{below}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def _is_there(self, path: str) -> bool:
        self._files.invalidate_cache()
        try:
            self._files.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _make(self, directory: str) -> None:
        if not self._has_buckets:
            self._files.makedirs(directory, exist_ok=True)

    def _upload(self, name: str, pieces: Iterable[bytes]) -> tuple[int, str]:
        """Write a file in parts of bounded size; return its size and SHA-256."""
        digest, size = hashlib.sha256(), 0
        with self._files.open(f"{self.root}/{name}", "wb", block_size=_part_size(pieces)) as target:
            for piece in pieces:
                target.write(piece)
                digest.update(piece)
                size += len(piece)
                self.moved += len(piece)
        return size, digest.hexdigest()

    def _check_size(self, path: str, size: int) -> None:
        self._files.invalidate_cache()
        if (stored := self._files.info(path)["size"]) != size:
            raise OSError(f"{path} has {stored:,} bytes there, not {size:,}")

    def _fetch(self, name: str, into: Path) -> tuple[int, str]:
        with writes_to(into):
            target = into.open("wb", buffering=0)
        with target:
            return self._copy(name, target)

    def _copy(self, name: str, target: FileIO) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        with self._files.open(f"{self.root}/{name}", "rb", block_size=_LEAST_PART, cache_type="readahead") as source:
            while piece := source.read(_PIECE):
                _append(piece, target)
                digest.update(piece)
                size += len(piece)
                self.moved += len(piece)
        return size, digest.hexdigest()

    def _in_words(self, error: Exception, unusable: type[TrainwrightError] = MachineError) -> TrainwrightError:
        kind, why = type(error).__name__, " ".join(str(error).split())
        if isinstance(error, PermissionError) or "Credential" in kind or "Forbidden" in why:
            return RequestError(
                f"{self._key}: {self.where} refuses access: {why or kind}; check the keys that its library reads from "
                "the environment, and that they may list, read, write and delete there"
            )
        if isinstance(error, FileNotFoundError):
            return RequestError(f"{self._key}: {self.where} does not exist: {why}; create the bucket, or correct it")
        if isinstance(error, NotADirectoryError | FileExistsError):
            return RequestError(f"{self._key}: {self.where} is not a directory: {why}; correct it")
        return unusable(f"{self._key}: {self.where} cannot be used now: {why or kind}; try again, or correct it")


class _Pieces:
    """The content of an open file, a piece at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, 2)

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        while piece := self._file.read(_PIECE):
            yield piece


def _append(piece: bytes, target: FileIO) -> None:
    """Write to a file of this machine, which has no buffer, so that a full disk fails here and not in closing it."""
    with writes_to(Path(target.name)):
        rest = memoryview(piece)
        while rest:
            rest = rest[target.write(rest) :]


def _part_size(pieces: Iterable[bytes]) -> int:
    """Return the bytes per part of an upload, which is what stays in memory, a multiple of 256 KiB."""
    needed = getattr(pieces, "size", 0) // _MAX_PARTS
    return max(_LEAST_PART, -(-needed // 2**18) * 2**18)


def _refuse_secrets(where: str, key: str) -> None:
    """Raise RequestError if a URL has a password or a key in it, as the recipe is kept in the run directory."""
    if "://" not in where:
        return
    try:
        parts = urlsplit(where)
        secret = parts.password is not None or any(_SECRETS.search(name) for name in parse_qs(parts.query))
    except ValueError as error:
        raise RequestError(f"{key}: a URL is not valid: {error}; correct it") from error
    if secret:
        raise RequestError(
            f"{key}: the URL of {parts.scheme}://{parts.hostname or ''} has a password or key in it, which would be "
            "written into the run directory; remove it, and set it in the environment or the configuration of fsspec"
        )
