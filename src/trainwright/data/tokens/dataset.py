"""Tokenized examples on disk, which every worker memory-maps, and the mixture of their sources.

A dataset directory holds flat arrays and a small JSON file:

    tokens.npy    int32  [total]        the tokens of all sequences, concatenated
    targets.npy   bool   [total]        True if the token is a target
    offsets.npy   int64  [sequences+1]  the start of each sequence
    members.npy   int64  [examples, k]  the sequences of each example; absent if each sequence is an example
    roles.npy     int8   [sequences]    the role of each sequence in its example; absent if all are the same
    dataset.json  fingerprint, report, names of the arrays, and the parts of a mixture

An example of a preference task has two sequences, which are always in one micro-batch.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_ARRAYS = {"tokens": "<i4", "targets": "|b1", "offsets": "<i8", "members": "<i8", "roles": "|i1"}
# What reading a damaged directory raises, wherever the damage is.
DAMAGED = (FileNotFoundError, NotADirectoryError, EOFError, ValueError, LookupError, TypeError)
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MixturePart:
    """One source of a mixture: it has ``examples`` examples, and each epoch samples ``drawn`` of them."""

    examples: int
    drawn: int


@dataclass(frozen=True)
class PairedSequences:
    """The ``count`` sequences from ``begin`` on, one of which joins each example; they alternate over epochs."""

    begin: int
    count: int


@dataclass(frozen=True)
class TokenDataset:
    """Examples as flat arrays; ``report`` holds the counts of the preparation.

    ``members`` may use a sequence in any number of examples. ``mixture``: the sources, whose examples are stored one
    source after another and are sampled by share. With ``paired``, example ``i + n * len(self)`` is example ``i``
    together with paired sequence ``n``.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    fingerprint: str
    report: dict[str, Any] = field(default_factory=dict)
    members: npt.NDArray[np.int64] | None = None
    roles: npt.NDArray[np.int8] | None = None
    mixture: tuple[MixturePart, ...] | None = None
    paired: PairedSequences | None = None

    def __len__(self) -> int:
        return self.sequence_count if self.members is None else len(self.members)

    @property
    def sequence_count(self) -> int:
        """Return the number of sequences."""
        return len(self.offsets) - 1

    @property
    def sequences_per_example(self) -> int:
        """Return the number of sequences of each example, its paired sequence included."""
        return (1 if self.members is None else self.members.shape[1]) + (self.paired is not None)

    def sequences(self, index: int) -> tuple[int, ...]:
        """Return the sequences of one example, in order; a paired sequence comes last."""
        paired_sequences: tuple[int, ...] = ()
        if self.paired is not None:
            turn, index = divmod(index, len(self))
            paired_sequences = (self.paired.begin + turn,)
        members = (index,) if self.members is None else tuple(self.members[index].tolist())
        return members + paired_sequences

    def role(self, sequence: int) -> int:
        """Return the role of one sequence in its example."""
        return 0 if self.roles is None else int(self.roles[sequence])

    def sequence_length(self, sequence: int) -> int:
        """Return the number of tokens of one sequence."""
        return int(self.offsets[sequence + 1] - self.offsets[sequence])

    def sequence(self, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return ``(tokens [length], targets [length])`` of one sequence."""
        begin, end = int(self.offsets[sequence]), int(self.offsets[sequence + 1])
        return self.tokens[begin:end], self.targets[begin:end]

    def sequence_targets(self, sequence: int) -> int:
        """Return the number of targets of one sequence; its first token is never one."""
        begin, end = int(self.offsets[sequence]), int(self.offsets[sequence + 1])
        return int(np.count_nonzero(self.targets[begin + 1 : end]))

    def length(self, index: int) -> int:
        """Return the number of tokens of one example."""
        return sum(map(self.sequence_length, self.sequences(index)))

    def target_count(self, index: int) -> int:
        """Return the number of targets of one example."""
        return sum(map(self.sequence_targets, self.sequences(index)))

    def example_lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of every example [examples]; with paired sequences, those of the first epoch."""
        sequence_lengths: npt.NDArray[np.int64] = np.diff(self.offsets)
        lengths = sequence_lengths[: len(self)] if self.members is None else sequence_lengths[self.members].sum(1)
        if self.paired is None:
            return lengths
        partners = draw_examples([MixturePart(self.paired.count, len(self))], 0, self.fingerprint)
        return lengths + sequence_lengths[self.paired.begin + partners]

    def target_fraction(self, examples: Sequence[int] | Indices | None = None) -> float:
        """Return the fraction of tokens that are targets, of all or of some examples."""
        if examples is None:
            return int(np.count_nonzero(self.targets)) / max(1, self.token_count)
        return sum(map(self.target_count, examples)) / max(1, sum(map(self.length, examples)))

    def will_need(self, examples: Iterable[int]) -> None:
        """Do nothing: the arrays are small enough to stay in memory."""

    @property
    def token_count(self) -> int:
        """Return the number of tokens."""
        return int(self.offsets[-1])

    @classmethod
    def from_examples(
        cls,
        examples: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]],
        fingerprint: str,
        report: dict[str, Any] | None = None,
    ) -> TokenDataset:
        """Create an in-memory dataset from ``(tokens, targets)`` pairs, each an example of one sequence."""
        tokens: list[npt.NDArray[np.int32]] = []
        targets: list[npt.NDArray[np.bool_]] = []
        offsets = [0]
        for ids, flags in examples:
            tokens.append(np.asarray(ids, dtype=np.int32))
            targets.append(np.asarray(flags, dtype=np.bool_))
            offsets.append(offsets[-1] + len(tokens[-1]))
        return cls(
            np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            np.concatenate(targets) if targets else np.zeros(0, np.bool_),
            np.asarray(offsets, dtype=np.int64),
            fingerprint,
            report or {},
        )

    def part(self, sequences: Iterable[int]) -> TokenDataset:
        """Return an in-memory dataset of some of the sequences, each an example, in this order."""
        pairs = [self.sequence(sequence) for sequence in sequences]
        return TokenDataset.from_examples([(ids.tolist(), flags.tolist()) for ids, flags in pairs], "part")

    def save(self, directory: Path) -> None:
        """Write to the new ``directory``."""
        directory.mkdir(parents=True)
        arrays = {name: array for name in _ARRAYS if (array := getattr(self, name)) is not None}
        for name, array in arrays.items():
            np.save(directory / f"{name}.npy", array)
        write_about(directory, self.fingerprint, self.report, list(arrays), self.mixture)

    @classmethod
    def open(cls, directory: Path) -> TokenDataset:
        """Memory-map a saved dataset; pages are loaded on demand and shared between processes."""
        about = json.loads((directory / "dataset.json").read_text(encoding="utf-8"))
        names = [name for name in _ARRAYS if name in about["arrays"]]
        arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in names}
        offsets = arrays["offsets"] = np.asarray(arrays["offsets"])
        kinds = {name: array.dtype.str for name, array in arrays.items()}
        lengths = {len(arrays["tokens"]), len(arrays["targets"]), int(offsets[-1])}
        if not kinds.items() <= _ARRAYS.items() or len(lengths) > 1 or (np.diff(offsets, prepend=0) < 0).any():
            raise ValueError(f"{directory}: its arrays do not belong together")
        mixture = tuple(MixturePart(*part) for part in about["mixture"]) if about["mixture"] else None
        return cls(**arrays, fingerprint=about["fingerprint"], report=about["report"], mixture=mixture)


def open_dataset(directory: Path) -> TokenDataset | None:
    """Return a saved dataset; None if it is missing or damaged. Raises OSError if it cannot be read now."""
    try:
        return TokenDataset.open(directory)
    except DAMAGED:
        return None


def write_about(
    directory: Path,
    fingerprint: str,
    report: dict[str, Any],
    arrays: list[str],
    mixture: tuple[MixturePart, ...] | None,
) -> None:
    """Write ``dataset.json`` for a directory of ``arrays``."""
    parts = None if mixture is None else [astuple(part) for part in mixture]
    about = {"fingerprint": fingerprint, "report": report, "arrays": arrays, "mixture": parts}
    (directory / "dataset.json").write_text(json.dumps(about), encoding="utf-8")


class TokenSpool:
    """Sequences stored one after another in unnamed temporary files, which are deleted when closed, or in memory."""

    def __init__(self, directory: Path | None) -> None:
        self._tokens: BinaryIO = BytesIO()
        self._targets: BinaryIO = BytesIO()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._tokens = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed with the spool)
            self._targets = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
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
        """Append a sequence."""
        self._tokens.write(tokens.astype("<i4", copy=False).tobytes())
        self._targets.write(targets.tobytes())
        self._offsets.append(self._offsets[-1] + len(tokens))
        self.roles.append(role)
        self.target_tokens += int(targets[1:].sum())

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._offsets[sequence + 1] - self._offsets[sequence]

    def read(self, sequence: int) -> tuple[bytes, bytes]:
        """Return the tokens of a sequence as little-endian int32, and its targets as bytes of 0 and 1."""
        begin, length = self._offsets[sequence], self.length(sequence)
        self._tokens.seek(begin * 4)
        self._targets.seek(begin)
        return self._tokens.read(length * 4), self._targets.read(length)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._targets.close()


def build_header(length: int, role: int) -> bytes:
    """Return the header of a sequence for hashing: its length and role."""
    return length.to_bytes(8, "little") + (role.to_bytes(1, "little") if role else b"")


def write_dataset(
    directory: Path,
    parts: Sequence[tuple[TokenSpool, Indices]],
    sequences_per_example: int,
    report: dict[str, Any],
    mixture: tuple[MixturePart, ...] | None = None,
) -> int:
    """Create ``directory`` with a dataset of the selected sequences of each spool; return its number of tokens.

    The fingerprint depends only on their tokens, targets and roles, and on the mixture.
    """
    directory.mkdir(parents=True)
    lengths = np.concatenate(
        [np.fromiter((spool.length(int(d)) for d in sequences), np.int64, len(sequences)) for spool, sequences in parts]
    )
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    total = int(offsets[-1])
    digest = hashlib.sha256()
    roles = array("b")
    with (directory / "tokens.npy").open("wb") as tokens, (directory / "targets.npy").open("wb") as targets:
        _write_npy_header(tokens, "<i4", total)
        _write_npy_header(targets, "|b1", total)
        for spool, sequences in parts:
            for sequence in sequences:
                ids, flags = spool.read(int(sequence))
                role = spool.roles[sequence]
                digest.update(build_header(len(flags), role) + ids + flags)
                tokens.write(ids)
                targets.write(flags)
                roles.append(role)
    if mixture is not None:
        digest.update(repr(mixture).encode())
    arrays = ["tokens", "targets", "offsets"]
    np.save(directory / "offsets.npy", offsets)
    if sequences_per_example > 1:
        np.save(directory / "members.npy", np.arange(len(lengths), dtype=np.int64).reshape(-1, sequences_per_example))
        arrays.append("members")
    if any(roles):
        np.save(directory / "roles.npy", np.frombuffer(roles, dtype=np.int8))
        arrays.append("roles")
    write_about(directory, digest.hexdigest()[:32], report, arrays, mixture)
    return total


def _write_npy_header(file: BinaryIO, kind: str, length: int) -> None:
    about = {"descr": kind, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, about)  # type: ignore[no-untyped-call, unused-ignore]


def divide_epoch(sizes: Sequence[int], weights: Sequence[float]) -> tuple[MixturePart, ...]:
    """Divide an epoch, which has as many examples as all sources together, by weight (largest remainders)."""
    return tuple(map(MixturePart, sizes, compute_shares(sum(sizes), weights)))


def compute_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` in proportion to ``weights`` by largest remainders; ties go to the earlier weight."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def draw_examples(parts: Sequence[MixturePart], epoch: int, key: str) -> Indices:
    """Return the examples of one epoch before shuffling: a pure function of the arguments.

    Each source is sampled in rounds, each a permutation of its examples, and an epoch continues where the previous one
    stopped, so examples of a source are used almost equally often.
    """
    pieces: list[Indices] = []
    begin = 0
    for index, part in enumerate(parts):
        first, last = epoch * part.drawn, (epoch + 1) * part.drawn
        pieces.append(begin + draw_rounds(part.examples, first, last, f"{key}/{index}"))
        begin += part.examples
    return np.concatenate(pieces)


def permute_indices(size: int, key: str) -> Indices:
    """Return a permutation of 0 to size - 1 that depends only on ``key``."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    order: Indices = np.random.Generator(np.random.PCG64(seed)).permutation(np.arange(size, dtype=np.int64))
    return order


def draw_rounds(
    size: int, first: int, last: int, key: str, order: Callable[[int, str], Indices] = permute_indices
) -> Indices:
    """Return the examples ``first`` to ``last`` of endless rounds over ``size`` examples, each in an ``order``."""
    rounds = range(first // size, -(-last // size))
    pieces = [order(size, f"{key}/{turn}")[max(0, first - turn * size) : last - turn * size] for turn in rounds]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
