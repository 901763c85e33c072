"""Write tokens to the files of a dataset without holding all of them in memory."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainwright.data.tokens.dataset import write_about
from trainwright.data.tokens.mixture import Part

Indices = npt.NDArray[np.int64]


class TokenSpool:
    """Documents stored one after another in unnamed temporary files, which are deleted when closed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._tokens: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed with the spool)
        self._targets: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._offsets = array("q", [0])
        self.roles = array("b")
        self.target_tokens = 0

    def __len__(self) -> int:
        return len(self.roles)

    @property
    def token_count(self) -> int:
        """Return the number of tokens."""
        return self._offsets[-1]

    def add(self, tokens: npt.NDArray[np.int32], targets: npt.NDArray[np.bool_], role: int) -> None:
        """Append a document."""
        self._tokens.write(tokens.astype("<i4", copy=False).tobytes())
        self._targets.write(targets.tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))
        self.roles.append(role)
        self.target_tokens += int(targets[1:].sum())

    def length(self, document: int) -> int:
        """Return the number of tokens of a document."""
        return self._offsets[document + 1] - self._offsets[document]

    def read(self, document: int) -> tuple[bytes, bytes]:
        """Return the tokens of a document as little-endian int32, and its targets as bytes of 0 and 1."""
        begin, length = self._offsets[document], self.length(document)
        self._tokens.seek(begin * 4)
        self._targets.seek(begin)
        return self._tokens.read(length * 4), self._targets.read(length)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._targets.close()


def header(length: int, role: int) -> bytes:
    """Return the header of a document for hashing: its length and role."""
    return length.to_bytes(8, "little") + (role.to_bytes(1, "little") if role else b"")


def write_dataset(
    directory: Path,
    parts: Sequence[tuple[TokenSpool, Indices]],
    documents_per_example: int,
    report: dict[str, Any],
    mixture: tuple[Part, ...] | None = None,
) -> int:
    """Create ``directory`` with a dataset of the selected documents of each spool; return its number of tokens.

    The fingerprint depends only on their tokens, targets and roles, and on the mixture.
    """
    directory.mkdir(parents=True)
    lengths = np.concatenate(
        [np.fromiter((spool.length(int(d)) for d in documents), np.int64, len(documents)) for spool, documents in parts]
    )
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    total = int(offsets[-1])
    digest = hashlib.sha256()
    roles = array("b")
    with (directory / "tokens.npy").open("wb") as tokens, (directory / "targets.npy").open("wb") as targets:
        _npy_header(tokens, "<i4", total)
        _npy_header(targets, "|b1", total)
        for spool, documents in parts:
            for document in documents:
                ids, flags = spool.read(int(document))
                role = spool.roles[document]
                digest.update(header(len(flags), role) + ids + flags)
                tokens.write(ids)
                targets.write(flags)
                roles.append(role)
    if mixture is not None:
        digest.update(repr(mixture).encode())
    arrays = ["tokens", "targets", "offsets"]
    np.save(directory / "offsets.npy", offsets)
    if documents_per_example > 1:
        np.save(directory / "members.npy", np.arange(len(lengths), dtype=np.int64).reshape(-1, documents_per_example))
        arrays.append("members")
    if any(roles):
        np.save(directory / "roles.npy", np.frombuffer(roles, dtype=np.int8))
        arrays.append("roles")
    write_about(directory, digest.hexdigest()[:32], report, arrays, mixture)
    return total


def _npy_header(file: BinaryIO, kind: str, length: int) -> None:
    about = {"descr": kind, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, about)  # type: ignore[no-untyped-call, unused-ignore]
