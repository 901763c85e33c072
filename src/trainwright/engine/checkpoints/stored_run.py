"""What a run needs besides a checkpoint to go on elsewhere: its recipe, its plan and its events. Imports no torch.

Each copy of a checkpoint has a ``run.json`` with the texts of recipe.yaml and plan.json and a list of parts of
events.jsonl. Parts are never changed, so a copy writes only the events since the one before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from trainwright.engine.checkpoints.manifest import CheckpointError
from trainwright.engine.checkpoints.remote_store import RemoteStore
from trainwright.errors import writes_to

RECIPE, PLAN, EVENTS = "recipe.yaml", "plan.json", "events.jsonl"  # in a run directory
STORED_AS = "stored_as"  # in plan.json: the name of a run in its stores, if its directory has another
_FORMAT = 1
_SMALL = 2**20  # a last part with fewer bytes is written again with what follows, so that there are few parts
_PIECE = 2**20
_PART = re.compile(r"[0-9]{12,}-[0-9]{12,}-[0-9a-f]{12}\.jsonl")


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
            stored = cls(str(content["run"]), str(content["recipe"]), str(content["plan"]), parts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"run.json is not the record of a run: {error}") from error
        ends = [0, *(part.end for part in parts)]
        if any(part.start != end or not _PART.fullmatch(part.name) for part, end in zip(parts, ends, strict=False)):
            raise CheckpointError("the parts of the events in run.json do not make one whole")
        return stored

    @classmethod
    def of(cls, store: RemoteStore, name: str) -> StoredRun | None:
        """Return what is stored beside checkpoint ``name``; None if it was copied without. Raises CheckpointError."""
        try:
            return cls.parse(store.read_run(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def begins(self, file: Path) -> bool:
        """Return whether ``file`` begins with all of the stored events. Raises OSError."""
        with file.open("rb") as own:
            return all(_digest(_range(own, part.start, part.end)) == part.sha256 for part in self.events)

    def write_events(self, store: RemoteStore, file: Path) -> None:
        """Write the events to ``file``.

        Raises:
            CheckpointError: a part is missing or damaged.
            RequestError, MachineError: ``file`` cannot be written.
            Exception: the place cannot be read; whatever its library raises.
        """
        with writes_to(file):
            target = file.open("wb", buffering=0)
        with target:
            for part in self.events:
                try:
                    digest = store.read_part(part.name, target)
                except FileNotFoundError as error:
                    raise CheckpointError(f"a part of its events is missing: {error}") from error
                if digest != part.sha256:
                    raise CheckpointError(f"{part.name} of its events is damaged (its checksum differs)")
            with writes_to(file):
                os.fsync(target.fileno())


def name_in_stores(run: Path) -> str:
    """Return the name of a run's copies: that of its directory, with that of the array of jobs it is an element of."""
    run = run.absolute()
    try:
        stored = json.loads((run / PLAN).read_text(encoding="utf-8")).get(STORED_AS)
    except (OSError, ValueError, AttributeError, RecursionError):
        stored = None
    return stored if isinstance(stored, str) and stored else default_name(run)


def default_name(run: Path) -> str:
    """Return the name of the copies of a run that begins in this directory."""
    run = run.absolute()
    return f"{run.parent.name}-{run.name}" if run.name.isdigit() and run.parent.name else run.name


def identity_of(run: Path) -> str:
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
                if _digest(_range(file, part.start, part.end)) != part.sha256:
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
                part = Part(start, end, _digest(_range(file, start, end)))
                self._store.write_part(part.name, _range(file, start, end))
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


def _range(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
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
