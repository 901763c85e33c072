"""Convert raw rows with fields of any name to one layout, deduplicate and split them: ``trainwright data prepare``.

Rows are streamed: only a few bytes of each are kept in an index on disk, so sources may be larger than memory. The
split of a row depends only on the seed and its content, so equal rows are in the same split.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.data.rows.formats import EXAMPLES, NoTarget, to_row
from trainwright.data.rows.layouts import RowLayout, list_columns
from trainwright.data.rows.pairs import ANY, CHOSEN
from trainwright.data.sources.reading import iterate_source, list_source_notes
from trainwright.data.sources.row_files import Row, to_json
from trainwright.errors import RequestError
from trainwright.recipe.sections.data import RowSettings

SPLITS = ("train", "validation", "test")
_KEY = "data prepare"
_FIRST = 8
_ALL = "all"
# Fields of a written row that hold turns.
_TURNS = ("messages", "prompt", "completion", "chosen", "rejected")
_SHOWN = 5
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


class Repetition(Enum):
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

    def add(self, rank: bytes, text: str, row: Row, rest: str = "") -> Repetition:
        """Add a row with its rank in the split, unless it repeats an earlier one; return whether it does.

        Args:
            rest: the columns of the row that are not in ``text``, as JSON.
        """
        if self._deduplicate != "none" and (repetition := self._classify_repetition(text, rest)) is not Repetition.NEW:
            return repetition
        if self._deduplicate == "near" and self._is_like_another(row):
            return Repetition.REPEATED
        self._database.execute("INSERT INTO ranks VALUES (?)", (rank,))
        return Repetition.NEW

    def find_borders(self, *counts: int) -> tuple[bytes, bytes]:
        """Return, for each of two counts, the rank below which that many rows are; fewer if equal ranks cross it."""
        self._database.execute("CREATE INDEX by_rank ON ranks (rank)")
        ranks = []
        for count in counts:
            query = self._database.execute("SELECT rank FROM ranks ORDER BY rank LIMIT 1 OFFSET ?", (count,))
            ranks.append(query.fetchone()[0])
        return ranks[0], ranks[1]

    def _classify_repetition(self, text: str, rest: str) -> Repetition:
        digest, rest_digest = (hashlib.blake2b(part.encode(), digest_size=16).digest() for part in (text, rest))
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, rest_digest)).rowcount == 1:
            return Repetition.NEW
        (first,) = self._database.execute("SELECT rest FROM seen WHERE digest = ?", (digest,)).fetchone()
        return Repetition.REPEATED if first == rest_digest else Repetition.DIFFERENT

    def _is_like_another(self, row: Row) -> bool:
        texts = [str(turn["content"]) for turn in _list_turns(row) if turn["role"] != "system"]
        signature = _compute_signature(" ".join(texts or [str(row.get("text", ""))]))
        if signature is None:
            return False
        bands = [bytes([band]) + signature[band].tobytes() for band in range(_BANDS)]
        marks = ",".join("?" * len(bands))
        query = f"SELECT DISTINCT signature FROM bands JOIN signatures USING (id) WHERE band IN ({marks})"
        for (stored_signature,) in self._database.execute(query, bands):
            if np.mean(np.frombuffer(stored_signature, np.uint64) == signature.ravel()) >= _ALIKE:
                return True
        number = self._database.execute("INSERT INTO signatures VALUES (NULL, ?)", (signature.tobytes(),)).lastrowid
        self._database.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", [(band, number) for band in bands])
        return False


def _compute_signature(text: str) -> Any:
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


@dataclass
class SplitCounts:
    """Statistics of one split; lengths are in characters of text."""

    rows: int = 0
    turns: int = 0
    characters: int = 0
    longest: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    # Counts of rows by length, rounded down to a power of two.
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, row: Row) -> None:
        """Count a normalized row."""
        turns = _list_turns(row)
        size = sum(len(str(turn["content"])) for turn in turns) if turns else len(row.get("text", ""))
        self.rows += 1
        self.turns += len(turns)
        self.roles.update(str(turn["role"]) for turn in turns)
        self.characters += size
        self.longest = max(self.longest, size)
        self.lengths[1 << max(0, size.bit_length() - 1)] += 1


@dataclass
class SourceCounts:
    """What happened to the rows of one source."""

    source: str
    layout: RowLayout = RowLayout("")  # noqa: RUF009 (immutable text)
    renamed: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)  # columns kept in addition to the layout's
    not_kept: Counter[str] = field(default_factory=Counter)  # dropped columns, by rows in which they are not null
    rows: int = 0
    duplicates: int = 0
    differing: int = 0  # duplicates that differ in dropped columns
    wrong: int = 0
    first_wrong: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@dataclass
class Statistics:
    """The counts for each source and each split."""

    sources: list[SourceCounts]
    sides: dict[str, SplitCounts]
    seed: int
    deduplicate: str


@dataclass(frozen=True)
class SplitSettings:
    """How rows are divided.

    Attributes:
        validation, test: the fractions of the remaining rows that are held out.
        deduplicate: exact, near or none. Rows are equal if all their written fields are.
    """

    validation: float
    test: float
    seed: int
    deduplicate: str

    def check(self) -> None:
        """Raise RequestError for an unknown value, or if nothing remains to train on."""
        if self.deduplicate not in DUPLICATES:
            choices = ", ".join(DUPLICATES)
            raise RequestError(f"--deduplicate: unknown value {self.deduplicate!r}; choose from {choices}")
        if self.validation + self.test >= 1:
            fractions = f"--validation {self.validation:g} and --test {self.test:g}"
            raise RequestError(f"{fractions} leave nothing to train on; lower them")


def prepare_raw(
    sources: Sequence[str],
    out: Path,
    split: SplitSettings,
    *,
    renamed: Mapping[str, str],
    keep: Sequence[str] = (),
    skip_wrong: bool = False,
) -> Statistics:
    """Write ``train.jsonl``, ``validation.jsonl``, ``test.jsonl`` and ``statistics.json`` into ``out``, or nothing.

    Args:
        renamed: maps a field of the sources (dots select nested fields) to its new name.
        keep: columns to write in addition to the layout's; ``all`` keeps every column.
        skip_wrong: leave out and count invalid rows.

    Raises:
        RequestError: ``out`` is not empty, a source or one of its rows is invalid (the message names its file and
            line), or no rows remain.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"--out: {out} already exists; choose a new directory")
    split.check()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        statistics = Statistics([], {}, split.seed, split.deduplicate)
        with RowIndex(scratch / "index", split.deduplicate) as index:
            count = _normalize_all(
                sources, _Reader(renamed, keep, skip_wrong), scratch / "rows", index, statistics, split.seed
            )
            borders = index.find_borders(round(split.test * count), round((split.test + split.validation) * count))
        _divide(scratch / "rows", scratch, borders, statistics, split.seed)
        (scratch / "rows").unlink()
        text = json.dumps(statistics, default=vars, indent=2, ensure_ascii=False)
        # A file name may not be valid UTF-8; its surrogate escapes are written as JSON escapes.
        (scratch / "statistics.json").write_bytes(f"{text}\n".encode(errors="backslashreplace"))
        scratch.chmod(0o755)
        if out.exists():
            out.rmdir()
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return statistics


def _normalize_all(
    sources: Sequence[str], reader: _Reader, file: Path, index: RowIndex, statistics: Statistics, seed: int
) -> int:
    """Write the rows to keep of all sources into one file; return their number."""
    row_count, kinds = 0, dict[str, str]()
    with file.open("w", encoding="utf-8") as rows:
        for source in sources:
            counts = SourceCounts(source)
            statistics.sources.append(counts)
            for row, rest in reader.rows(source, counts):
                kinds.setdefault(next(iter(row)), source)
                text = to_json(row)
                repetition = index.add(_hash_row(text, seed), text, row, rest)
                if repetition is not Repetition.NEW:
                    counts.duplicates += 1
                    counts.differing += repetition is Repetition.DIFFERENT
                    continue
                row_count += 1
                rows.write(text + "\n")
    reader.check_names()
    if not row_count:
        reasons = sum((source.left_out for source in statistics.sources), Counter[str]())
        reasons["wrong"] += sum(source.wrong for source in statistics.sources)
        listing = "; ".join(f"{count:,}: {why}" for why, count in reasons.items() if count)
        raise RequestError(f"{_KEY}: no row has a token to train on ({listing})")
    if len(kinds) > 1:
        listing = " and ".join(f"{shape} ({source})" for shape, source in kinds.items())
        raise RequestError(
            f"{_KEY}: the sources have rows of {listing}, which cannot be in one file; prepare them separately"
        )
    return row_count


@dataclass
class _Reader:
    """Reads rows of sources in one layout, with the options of the command line."""

    renamed: Mapping[str, str]
    keep: Sequence[str]
    skip_wrong: bool
    used: set[str] = field(default_factory=set)  # fields to rename that occurred
    columns: set[str] = field(default_factory=set)  # columns outside the layout that occurred

    def rows(self, source: str, counts: SourceCounts) -> Iterator[tuple[Row, str]]:
        """Yield each row as it will be written, and the JSON of its dropped columns."""
        rows = iterate_source(source, key=_KEY)
        first = list(islice(rows, _FIRST))
        if not first:
            raise RequestError(f"{_KEY}: {source} has no rows")
        renamed_first = [_rename(row, self.renamed, self.used) for _, row in first]
        counts.layout = layout = ANY.layout(list_columns(renamed_first), renamed_first, RowSettings(), source)
        counts.renamed = {**self.renamed, **layout.renamed}
        for location, row in chain(first, rows):
            counts.rows += 1
            renamed_row = _rename(row, self.renamed, self.used)
            try:
                sequences = ANY.sequences(renamed_row, layout, counts.remarks)
            except NoTarget as reason:
                counts.left_out[str(reason)] += 1
                continue
            except RequestError as error:
                if not self.skip_wrong:
                    raise RequestError(f"{location}: {error} (pass --skip-wrong to skip such rows)") from None
                counts.wrong += 1
                counts.first_wrong += [f"{location}: {error}"] if len(counts.first_wrong) < _SHOWN else []
                continue
            yield self._written(renamed_row, _build_row(sequences, layout), layout, counts)
        counts.notes += list_source_notes(source, _KEY)

    def check_names(self) -> None:
        """Raise RequestError if a column named on the command line is in no row."""
        if unknown := sorted(set(self.renamed) - self.used):
            raise RequestError(f"--map: no row has a field {unknown[0]}")
        if unknown := sorted(set(self.keep) - self.columns - {_ALL}):
            hint = f"other columns: {', '.join(sorted(self.columns))}" if self.columns else "there are no other columns"
            raise RequestError(f"--keep: no row has a column {unknown[0]} in addition to its layout; {hint}")

    def _written(self, own: Row, converted: Row, layout: RowLayout, counts: SourceCounts) -> tuple[Row, str]:
        more, rest = {}, {}
        for column in layout.unused(list(own)):
            self.columns.add(column)
            if _ALL not in self.keep and column not in self.keep:
                rest[column] = own[column]
                counts.not_kept[column] += own[column] is not None
                continue
            name = f"{column}_" if column in (*_TURNS, "text", "label", "tools") else column
            more[name] = own[column]
            if name not in counts.kept:
                counts.kept.append(name)
        return {**converted, **more}, json.dumps(rest, sort_keys=True, default=str) if rest else ""


def _rename(row: Row, names: Mapping[str, str], used: set[str]) -> Row:
    result = dict(row)
    for name, ours in names.items():
        if name in row:
            value = result.pop(name, None)
        else:
            value = row
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is None:
                continue
        used.add(name)
        result[ours] = value
    return result


def _build_row(sequences: Sequence[tuple[int, Any]], layout: str) -> Row:
    """Return a row of layout messages, text, preference or labelled."""
    role, example = sequences[0]
    if layout == "preference":
        return {"chosen": example, "rejected": sequences[1][1]}
    if layout == "labelled":
        return {"prompt": example[:-1], "completion": example[-1:], "label": role == CHOSEN}
    return {"text": example} if isinstance(example, str) else to_row(example)


def _list_turns(row: Row) -> list[Any]:
    return [turn for field in _TURNS for turn in row.get(field, ())]


def _hash_row(text: str, seed: int) -> bytes:
    """Return the hash of a row and the seed that decides its split."""
    return hashlib.sha256(f"{seed}/{text}".encode()).digest()[:16]


def _divide(rows: Path, directory: Path, borders: tuple[bytes, bytes], statistics: Statistics, seed: int) -> None:
    test, validation = borders
    files = {name: (directory / f"{name}.jsonl").open("w", encoding="utf-8") for name in SPLITS}
    try:
        statistics.sides = {name: SplitCounts() for name in SPLITS}
        with rows.open(encoding="utf-8") as lines:
            for line in lines:
                rank = _hash_row(line.rstrip("\n"), seed)
                name = "test" if rank < test else "validation" if rank < validation else "train"
                files[name].write(line)
                statistics.sides[name].add(json.loads(line))
    finally:
        for file in files.values():
            file.close()
    for name in SPLITS[1:]:
        if not statistics.sides[name].rows:
            (directory / f"{name}.jsonl").unlink()
            del statistics.sides[name]


@dataclass
class Styled:
    """Numbers of rows that were changed, kept and left out."""

    added: int = 0
    replaced: int = 0
    kept: int = 0  # with their own system turn
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)  # about how the rows were read


def style_rows(source: str, system: str, out: Path, *, replace: bool) -> Styled:
    """Write the conversations of ``source`` as messages that start with ``system``; the file is written atomically.

    Columns that do not belong to the turns are kept.

    Args:
        replace: also replace existing system turns.

    Raises:
        RequestError: ``out`` exists, or the source or one of its rows is wrong or has no conversation.
    """
    if not system.strip():
        raise RequestError("--system: is empty; pass the text of a system turn, or @FILE")
    if not system.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in system):
        raise RequestError("--system: is not UTF-8 text; pass UTF-8, or @FILE")
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new file")
    rows = iterate_source(source, key="data style")
    first = list(islice(rows, 8))
    first_rows = [row for _, row in first]
    layout = EXAMPLES.layout(list_columns(first_rows), first_rows, RowSettings(), source)
    if layout == "text":
        raise RequestError(f"{source}: the rows are plain text without turns, so they cannot have a system prompt")
    result = Styled()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            for location, row in chain(first, rows):
                try:
                    [(_, messages)] = EXAMPLES.sequences(row, layout)
                except NoTarget as reason:
                    result.left_out[str(reason)] += 1
                    continue
                except RequestError as error:
                    raise RequestError(f"{location}: {error}") from None
                assert not isinstance(messages, str)
                if messages[0]["role"] != "system":
                    messages, result.added = [{"role": "system", "content": system}, *messages], result.added + 1
                elif replace:
                    messages, result.replaced = [{**messages[0], "content": system}, *messages[1:]], result.replaced + 1
                else:
                    result.kept += 1
                more = {name: row[name] for name in layout.unused(list(row)) if name not in ("messages", "tools")}
                file.write(to_json({**to_row(messages), **more}) + "\n")
        scratch.rename(out)
        result.notes += list_source_notes(source, "data style")
    finally:
        scratch.unlink(missing_ok=True)
    return result
