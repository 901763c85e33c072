"""Find exact and near duplicates of rows, with an index on disk."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.data.sources.row_files import Row

DUPLICATES = ("exact", "near", "none")

# MinHash (Broder 1997) over the sets of word 5-grams, with bands to find candidates (Leskovec, Rajaraman and Ullman,
# Mining of Massive Datasets, section 3.4): a pair of rows that share four fifths of their 5-grams is missed with
# probability 1e-4.
_WORDS = 5
_BANDS, _ROWS = 16, 4
_ALIKE = 0.8
_PRIME = (1 << 61) - 1
_CACHE_KIB = 16 * 1024
_COEFFICIENTS = np.random.default_rng(0).integers(1, 1 << 31, size=(2, _BANDS * _ROWS), dtype=np.uint64)


class Seen(Enum):
    """Whether a row repeats an earlier one; DIFFERENT: it does, except for its dropped columns."""

    NEW = "new"
    REPEATED = "repeated"
    DIFFERENT = "different"


class RowIndex:
    """An index of rows in a file, which is deleted on exit."""

    def __init__(self, file: Path, deduplicate: str) -> None:
        self._file = file
        self._deduplicate = deduplicate
        self._database = sqlite3.connect(file)
        self._database.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KIB};"
            "CREATE TABLE ranks (rank BLOB); CREATE TABLE seen (digest BLOB PRIMARY KEY, rest BLOB) WITHOUT ROWID;"
            "CREATE TABLE signatures (id INTEGER PRIMARY KEY, signature BLOB);"
            "CREATE TABLE bands (band BLOB, id INTEGER, PRIMARY KEY (band, id)) WITHOUT ROWID;"
        )

    def __enter__(self) -> RowIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        self._file.unlink(missing_ok=True)

    def add(self, rank: bytes, text: str, row: Row, rest: str = "") -> Seen:
        """Add a row with its rank in the split, unless it repeats an earlier one; return whether it does.

        Args:
            rest: the columns of the row that are not in ``text``, as JSON.
        """
        if self._deduplicate != "none" and (seen := self._seen(text, rest)) is not Seen.NEW:
            return seen
        if self._deduplicate == "near" and self._is_like_another(row):
            return Seen.REPEATED
        self._database.execute("INSERT INTO ranks VALUES (?)", (rank,))
        return Seen.NEW

    def borders(self, *counts: int) -> tuple[bytes, bytes]:
        """Return, for each of two counts, the rank below which that many rows are; fewer if equal ranks cross it."""
        self._database.execute("CREATE INDEX by_rank ON ranks (rank)")
        found = []
        for count in counts:
            query = self._database.execute("SELECT rank FROM ranks ORDER BY rank LIMIT 1 OFFSET ?", (count,))
            found.append(query.fetchone()[0])
        return found[0], found[1]

    def _seen(self, text: str, rest: str) -> Seen:
        digest, others = (hashlib.blake2b(part.encode(), digest_size=16).digest() for part in (text, rest))
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, others)).rowcount == 1:
            return Seen.NEW
        (first,) = self._database.execute("SELECT rest FROM seen WHERE digest = ?", (digest,)).fetchone()
        return Seen.REPEATED if first == others else Seen.DIFFERENT

    def _is_like_another(self, row: Row) -> bool:
        signature = _signature(" ".join(_texts(row)))
        if signature is None:
            return False
        bands = [bytes([band]) + signature[band].tobytes() for band in range(_BANDS)]
        marks = ",".join("?" * len(bands))
        query = f"SELECT DISTINCT signature FROM bands JOIN signatures USING (id) WHERE band IN ({marks})"
        for (other,) in self._database.execute(query, bands):
            if np.mean(np.frombuffer(other, np.uint64) == signature.ravel()) >= _ALIKE:
                return True
        number = self._database.execute("INSERT INTO signatures VALUES (NULL, ?)", (signature.tobytes(),)).lastrowid
        self._database.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", [(band, number) for band in bands])
        return False


def _signature(text: str) -> Any:
    """Return the MinHash of a text's word 5-grams [bands, rows], or None if it has fewer than five words."""
    words = re.findall(r"\w+", text.lower())
    grams = {" ".join(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)}
    if not grams:
        return None
    hashes = np.array(
        [int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=4).digest(), "little") for gram in grams], np.uint64
    )
    # Both factors are below 2^32, so the product does not overflow.
    values = (hashes[:, None] * _COEFFICIENTS[0] + _COEFFICIENTS[1]) % np.uint64(_PRIME)
    return values.min(0).reshape(_BANDS, _ROWS)


def _texts(row: Row) -> list[str]:
    fields = ("messages", "prompt", "completion", "chosen", "rejected")
    turns = [turn for field in fields for turn in row.get(field, ())]
    return [str(turn["content"]) for turn in turns if turn["role"] != "system"] or [str(row.get("text", ""))]
