"""Copies of a run: where they are, a directory or what a URL of fsspec names, such as a bucket; and what they hold.

    <store>/<run>/
      step-00000040/  the files of a checkpoint, then run.json, then manifest.json
      events/         parts of events.jsonl, which the run.json of each checkpoint refers to
      final/          the files of the trained model, then manifest.json
      attempts.json   how often a job was started again without a new checkpoint, where a cluster counts that

A manifest, which has the SHA-256 of every file, is written last: a copy without one is not complete. ``run.json`` has
what a run needs besides a checkpoint to go on elsewhere: the texts of recipe.yaml and plan.json, and a list of parts of
events.jsonl. Parts are never changed, so a copy writes only the events since the one before it. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from trainwright.engine.checkpoints.manifest import MANIFEST, CheckpointError, Manifest
from trainwright.errors import MachineError, RequestError, TrainwrightError, convert_write_errors
from trainwright.utils.installation import install_command
from trainwright.utils.paths import expand_user_path

RUN, _PARTS, ATTEMPTS = "run.json", "events", "attempts.json"
_STEP = re.compile(r"step-([0-9]{8,})")
_COPIED = 4 * 2**20
RECIPE, PLAN, EVENTS = "recipe.yaml", "plan.json", "events.jsonl"  # in a run directory
STORED_AS = "stored_as"  # in plan.json: the name of a run in its stores, if its directory has another
_FORMAT = 1
_SMALL = 2**20  # a last part with fewer bytes is written again with what follows, so that there are few parts
_PIECE = 2**20
_PART = re.compile(r"[0-9]{12,}-[0-9]{12,}-[0-9a-f]{12}\.jsonl")
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
            filesystem, root = fsspec.url_to_fs(where if "://" in where else str(expand_user_path(where).absolute()))
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            fix = install_command(extra) if extra else "install it"
            raise RequestError(f"{key}: {where} needs a library that is not installed ({error}); {fix}") from error
        except ValueError as error:
            raise RequestError(f"{key}: {where} cannot be opened: {error}; correct the URL") from error
        except Exception as error:  # of any library of fsspec, which may connect here
            raise self._convert_error(error) from error
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
            raise self._convert_error(error, unusable) from error

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
        with convert_write_errors(into):
            into.mkdir(parents=True)
        try:
            self._fetch(f"{name}/{MANIFEST}", into / MANIFEST)
            for file, digest in Manifest.read(into).files.items():  # names without directories
                if self._fetch(f"{name}/{file}", into / file) != digest:
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
        self._make(f"{self.root}/{_PARTS}")
        self._upload(f"{_PARTS}/{part}", pieces)

    def read_part(self, part: str, target: FileIO) -> str:
        """Append a part of the events to an unbuffered file; return its SHA-256."""
        return self._copy(f"{_PARTS}/{part}", target)[1]

    def parts(self) -> list[str]:
        """Return the names of the parts of the events here."""
        return self._names(f"/{_PARTS}")

    def remove_part(self, part: str) -> None:
        """Remove a part of the events."""
        self._files.rm_file(f"{self.root}/{_PARTS}/{part}")

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
        with self._files.open(f"{self.root}/{name}", "wb", block_size=_choose_part_size(pieces)) as target:
            for piece in pieces:
                target.write(piece)
                digest.update(piece)
                size += len(piece)
                self.moved += len(piece)
        return size, digest.hexdigest()

    def _check_size(self, path: str, size: int) -> None:
        self._files.invalidate_cache()
        if (stored_size := self._files.info(path)["size"]) != size:
            raise OSError(f"{path} has {stored_size:,} bytes there, not {size:,}")

    def _fetch(self, name: str, into: Path) -> tuple[int, str]:
        with convert_write_errors(into):
            target = into.open("wb", buffering=0)
        with target:
            return self._copy(name, target)

    def _copy(self, name: str, target: FileIO) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        with self._files.open(f"{self.root}/{name}", "rb", block_size=_LEAST_PART, cache_type="readahead") as source:
            while piece := source.read(_COPIED):
                _append(piece, target)
                digest.update(piece)
                size += len(piece)
                self.moved += len(piece)
        return size, digest.hexdigest()

    def _convert_error(self, error: Exception, unusable: type[TrainwrightError] = MachineError) -> TrainwrightError:
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
        while piece := self._file.read(_COPIED):
            yield piece


def _append(piece: bytes, target: FileIO) -> None:
    """Write to a file of this machine, which has no buffer, so that a full disk fails here and not in closing it."""
    with convert_write_errors(Path(target.name)):
        rest = memoryview(piece)
        while rest:
            rest = rest[target.write(rest) :]


def _choose_part_size(pieces: Iterable[bytes]) -> int:
    """Return the bytes per part of an upload, which is what stays in memory, a multiple of 256 KiB."""
    needed_bytes = getattr(pieces, "size", 0) // _MAX_PARTS
    return max(_LEAST_PART, -(-needed_bytes // 2**18) * 2**18)


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


@dataclass(frozen=True)
class Part:
    """The bytes of events.jsonl from ``start`` to ``end``."""

    start: int
    end: int
    sha256: str

    @property
    def name(self) -> str:
        """The part's name in a place."""
        return f"{self.start:012d}-{self.end:012d}-{self.sha256[:12]}.jsonl"


@dataclass(frozen=True)
class StoredRun:
    """The content of a run.json. ``run`` identifies the run: the SHA-256 of its first event."""

    run: str
    recipe: str
    plan: str
    events: tuple[Part, ...]

    def text(self) -> str:
        """Return it as JSON with its own checksum."""
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**content, "sha256": _digest_of(content)})

    @classmethod
    def parse(cls, text: str) -> StoredRun:
        """Return what a run.json holds. Raises CheckpointError."""
        try:
            content = json.loads(text)
            seal = content.pop("sha256")
            if content["format"] != _FORMAT:
                raise CheckpointError(f"run.json is written in format {content['format']!r}, not {_FORMAT}")
            if seal != _digest_of(content):
                raise CheckpointError("run.json is damaged (its checksum differs)")
            parts = tuple(Part(int(part["start"]), int(part["end"]), str(part["sha256"])) for part in content["events"])
            stored_run = cls(str(content["run"]), str(content["recipe"]), str(content["plan"]), parts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"run.json is not the record of a run: {error}") from error
        ends = [0, *(part.end for part in parts)]
        if any(part.start != end or not _PART.fullmatch(part.name) for part, end in zip(parts, ends, strict=False)):
            raise CheckpointError("the parts of the events in run.json do not make one whole")
        return stored_run

    @classmethod
    def of(cls, store: RemoteStore, name: str) -> StoredRun | None:
        """Return what is stored beside checkpoint ``name``; None if it was copied without. Raises CheckpointError."""
        try:
            return cls.parse(store.read_run(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def begins(self, file: Path) -> bool:
        """Return whether ``file`` begins with all of the stored events. Raises OSError."""
        with file.open("rb") as stream:
            return all(_digest(_iterate_range(stream, part.start, part.end)) == part.sha256 for part in self.events)

    def write_events(self, store: RemoteStore, file: Path) -> None:
        """Write the events to ``file``.

        Raises:
            CheckpointError: a part is missing or damaged.
            RequestError, MachineError: ``file`` cannot be written.
            Exception: the place cannot be read; whatever its library raises.
        """
        with convert_write_errors(file):
            target = file.open("wb", buffering=0)
        with target:
            for part in self.events:
                try:
                    digest = store.read_part(part.name, target)
                except FileNotFoundError as error:
                    raise CheckpointError(f"a part of its events is missing: {error}") from error
                if digest != part.sha256:
                    raise CheckpointError(f"{part.name} of its events is damaged (its checksum differs)")
            with convert_write_errors(file):
                os.fsync(target.fileno())


def name_in_stores(run: Path) -> str:
    """Return the name of a run's copies: that of its directory, with that of the array of jobs it is an element of."""
    run = run.absolute()
    try:
        stored_name = json.loads((run / PLAN).read_text(encoding="utf-8")).get(STORED_AS)
    except (OSError, ValueError, AttributeError, RecursionError):
        stored_name = None
    return stored_name if isinstance(stored_name, str) and stored_name else choose_default_name(run)


def choose_default_name(run: Path) -> str:
    """Return the name of the copies of a run that begins in this directory."""
    run = run.absolute()
    return f"{run.parent.name}-{run.name}" if run.name.isdigit() and run.parent.name else run.name


def read_identity(run: Path) -> str:
    """Return what tells this run from every other: the SHA-256 of its first event. Raises OSError."""
    with (run / EVENTS).open("rb") as file:
        return hashlib.sha256(file.readline()).hexdigest()


class EventParts:
    """Writes a run's events to a place, each only once."""

    def __init__(self, run: Path, store: RemoteStore) -> None:
        self._file, self._store = run / EVENTS, store
        self._parts: tuple[Part, ...] = ()

    def take_over(self, stored: StoredRun) -> None:
        """Rely on the parts that are in the place already, as far as they are this run's events."""
        with self._file.open("rb") as file:
            for part in stored.events:
                if _digest(_iterate_range(file, part.start, part.end)) != part.sha256:
                    return
                self._parts = (*self._parts, part)

    def write(self) -> tuple[Part, ...]:
        """Write the events since the last call; return all parts. Raises OSError."""
        with self._file.open("rb") as file:
            parts = self._parts
            if parts and parts[-1].end - parts[-1].start < _SMALL:
                parts = parts[:-1]
            start, end = parts[-1].end if parts else 0, _end_of_lines(file)
            if end > (self._parts[-1].end if self._parts else 0):
                part = Part(start, end, _digest(_iterate_range(file, start, end)))
                self._store.write_part(part.name, _iterate_range(file, start, end))
                self._parts = (*parts, part)
        return self._parts


def _end_of_lines(file: BinaryIO) -> int:
    """Return the number of bytes up to the last complete line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _PIECE)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def _iterate_range(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while start < end and (piece := file.read(min(_PIECE, end - start))):
        yield piece
        start += len(piece)


def _digest(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
