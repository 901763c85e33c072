"""Tokenize the rows of a source into examples with targets, and count rows that are cut, split or left out."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.chat_encoding import Encoded
from trainwright.data.rows.chat_templates import Remarks, describe_remedies
from trainwright.data.rows.formats import EXAMPLES, NoTarget, RowReader, TurnsError, split_by_turn
from trainwright.data.rows.layouts import PLAIN, RowLayout, describe_unused_columns
from trainwright.data.rows.texts import RowEncoder, build_encoder
from trainwright.data.sources.reading import list_media_notes, list_source_notes, locate_row, read_rows
from trainwright.data.sources.row_files import Row
from trainwright.data.tokens.dataset import TokenSpool, build_header
from trainwright.errors import RequestError
from trainwright.utils.activity import report_progress
from trainwright.utils.text import format_clause, format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.sections.data import DataSection, SourceSection

NumberedRow: TypeAlias = tuple[int, Row]  # (index in the source, from 0; row)

_BATCH = 256  # rows rendered and tokenized at a time
_BATCH_CHARACTERS = 2**20  # limit on the text of a batch, unless one row is longer
_DIGEST = 16  # bytes
_SKIPPED = "have parts of data.max_length tokens without a target, which are skipped"
_SAME_TOKENS = "the tokens of its answers are the same within data.max_length"


@dataclass
class TokenRows:
    """The examples of one source, each of the same number of sequences.

    A row is one example or, if it was split, several consecutive ones. ``digests`` are of the tokens and roles of the
    rows that became examples; equal rows have equal digests.
    """

    source: str
    format: RowLayout
    max_length: int
    detected: bool
    splits: bool
    spool: TokenSpool
    rows: int = 0
    examples_of_row: array[int] = field(default_factory=lambda: array("q"))  # of each row that became examples
    numbers: array[int] = field(default_factory=lambda: array("q"))  # index of each of these rows in the source, from 0
    sequences_per_example: int = 1
    digests: bytearray = field(default_factory=bytearray)
    truncated: int = 0
    cut_tokens: int = 0
    divided: int = 0  # rows split into several examples
    longest: int = 0  # before truncation
    without_target: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # rows without examples, by reason
    remarks: Counter[str] = field(default_factory=Counter)  # rows that were changed, by what they do
    encoding: Remarks = field(default_factory=Remarks)  # what their text or their template changes
    largest: tuple[int, int] = (-1, 0)  # the largest token id, and minus the index of the first row with it
    notes: list[str] = field(default_factory=list)
    drops: bool = False  # whether examples that are too long are left out
    compares_targets: bool = False  # whether rows with the same tokens and other targets differ
    repeats: int = 0  # rows that are left out because they repeat an earlier one

    def __len__(self) -> int:
        return len(self.spool) // self.sequences_per_example

    def add(self, index: int, examples: Sequence[Sequence[Encoded]], roles: Sequence[int]) -> None:
        """Add the examples of row ``index`` of the source: cut, split or leave out those that are too long.

        An example is left out if one of its sequences keeps no target, or if all of them are the same.

        Args:
            roles: of the sequences of each example.
        """
        self.rows += 1
        self.sequences_per_example = len(roles)
        digest = hashlib.blake2b(digest_size=_DIGEST)
        count = cut = 0
        parts = same = split = dropped = False
        for sequences in examples:
            tokens = [np.asarray(ids, dtype=np.int32) for ids, _ in sequences]
            targets = [np.asarray(flags, dtype=np.bool_) for _, flags in sequences]
            self.longest = max(self.longest, *map(len, tokens))
            is_long = any(len(ids) > self.max_length for ids in tokens)
            ends = [(0, self.max_length)]
            if self.splits and len(tokens[0]) > self.max_length and len(tokens) == 1:
                ends = split_windows(len(tokens[0]), self.max_length)
            elif not self.drops:
                cut += sum(max(0, len(ids) - self.max_length) for ids in tokens)
                tokens = [ids[: self.max_length] for ids in tokens]
                targets = [flags[: self.max_length] for flags in targets]
            # Nothing precedes the first token to predict it from.
            spans = [(begin, end) for begin, end in ends if all(flags[begin + 1 : end].any() for flags in targets)]
            if self.drops and is_long:
                spans, dropped = [], True
            if len(tokens) > 1 and spans and all(np.array_equal(ids, tokens[0]) for ids in tokens):
                spans, same = [], True
            if spans:
                self.largest = max(self.largest, (max(int(ids.max()) for ids in tokens), -index))
            for begin, end in spans:
                for ids, flags, role in zip(tokens, targets, roles, strict=True):
                    self.spool.add(ids[begin:end], flags[begin:end], role)
            parts |= 0 < len(spans) < len(ends)
            split |= len(spans) > 1
            count += len(spans)
            for ids, flags, role in zip(tokens, targets, roles, strict=True):
                digest.update(build_header(len(ids), role) + ids.tobytes())
                digest.update(flags.tobytes() if self.compares_targets else b"")
        self.truncated += bool(cut)
        self.cut_tokens += cut
        self.divided += split
        self.remarks.update([_SKIPPED] if parts else [])
        if count:
            self.examples_of_row.append(count)
            self.numbers.append(index)
            self.digests += digest.digest()
        elif same:
            self.left_out[_SAME_TOKENS] += 1
        elif dropped:
            self.left_out[f"it is longer than data.max_length {self.max_length:,}"] += 1
        else:
            self.without_target += 1

    def leave_out(self, why: str) -> None:
        """Count a row that has no target."""
        self.rows += 1
        self.left_out[why] += 1

    @property
    def hashes(self) -> npt.NDArray[np.void]:
        """Return a digest of each row that became examples."""
        return np.frombuffer(bytes(self.digests), dtype=f"V{_DIGEST}")

    @property
    def duplicates(self) -> int:
        """Return the number of rows with the same tokens as an earlier row."""
        return len(self.hashes) - len(np.unique(self.hashes))

    def list_sequences(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices of the sequences that ``rows`` (among the rows with examples) became, in order."""
        counts = np.frombuffer(self.examples_of_row, dtype=np.int64) * self.sequences_per_example
        begins = np.cumsum(counts) - counts
        within = np.arange(int(counts[rows].sum())) - np.repeat(np.cumsum(counts[rows]) - counts[rows], counts[rows])
        return np.repeat(begins[rows], counts[rows]) + within

    def report(self) -> dict[str, Any]:
        """Return the counts over the whole source."""
        return {
            "source": self.source,
            "format": self.format,
            "rows": self.rows,
            "examples": len(self),
            "tokens": self.spool.token_count,
            "target_tokens": self.spool.target_tokens,
            "longest": self.longest,
            "truncated": self.truncated,
            "cut_tokens": self.cut_tokens,
            "divided": self.divided,
            "without_target": self.without_target,
            "left_out": dict(self.left_out),
            "duplicates": self.duplicates,
            "largest_token": [self.largest[0], -self.largest[1]],
        }

    def summary(self, name: str) -> list[str]:
        """Return the counts as lines of text."""
        count = self.report()
        how = "detected from the first rows" if self.detected else "set by data.format"
        how += f"; {self.format.read_as}" if self.format.read_as else ""
        lines = [
            f"{name}: {self.source}, {format_plural(self.rows, 'row')} of {self.format} ({how})",
            f"{name}: {count['tokens']:,} tokens, {count['target_tokens']:,} of them targets; "
            f"longest {'row' if self.sequences_per_example == 1 else 'side'} {format_plural(self.longest, 'token')}",
        ]
        if self.truncated:
            lines.append(
                f"{name}: {self.truncated:,} of {format_plural(self.rows, 'row')} cut to data.max_length "
                f"{self.max_length:,}, {format_plural(self.cut_tokens, 'token')} lost"
            )
        if self.divided:
            lines.append(
                f"{name}: {self.divided:,} of {format_plural(self.rows, 'row')} split at data.max_length "
                f"{self.max_length:,}; "
                f"{format_plural(len(self), 'example')} in all"
            )
        if self.without_target:
            rows = format_plural(self.without_target, "row")
            lines.append(f"{name}: {rows} left out: no target in what is kept")
        lines += [f"{name}: {format_plural(count, 'row')} left out: {why}" for why, count in self.left_out.items()]
        lines += [f"{name}: {format_clause(count, 'row', remark)}" for remark, count in self.remarks.items()]
        lines += [f"{name}: {line}" for line in self.encoding.lines()]
        if self.compares_targets and self.repeats:
            lines.append(
                f"{name}: {format_plural(self.repeats, 'row')} left out: the same tokens and targets as an earlier one"
            )
        elif self.duplicates and not self.compares_targets:
            repeat = format_clause(self.duplicates, "row", "repeat an earlier one token by token")
            lines.append(f"{name}: {repeat}; nothing is removed")
        return lines + [f"{name}: {note}" for note in self.notes]


def split_windows(length: int, longest: int) -> list[tuple[int, int]]:
    """Return the (begin, end) of each window of at most ``longest`` tokens that a longer text is split into.

    Each window starts with the last token of the one before, which is not a target as a window's first token but was
    one in the window before.
    """
    return [(begin, min(begin + longest, length)) for begin in range(0, length - 1, longest - 1)]


def is_long_split(long_documents: str, layout: str) -> bool:
    """Return whether rows of ``layout`` that are too long are split instead of cut (``data.long_documents``)."""
    return long_documents == "split" or (long_documents == "auto" and layout == "text")


def tokenize_source(
    source: SourceSection,
    tokenizer: PreTrainedTokenizerBase,
    data: DataSection,
    kind: RowReader,
    *,
    key: str,
    spool: Path,
) -> TokenRows:
    """Read ``source`` and encode each row; the tokens are stored in files in the directory ``spool``.

    A row goes through ``read_rows``, ``RowReader.sequences`` (its messages), ``ChatEncoder.encode`` (tokens and
    targets) and ``TokenRows.add`` (cut and stored).

    Raises:
        RequestError: the source, its layout or a row is wrong (the message names the row's file and line), or no row
            has a target.
    """
    name, documents = source.source, source.is_documents
    rows = read_rows(name, source.limit, key, documents, functools.partial(kind.narrowing, source.rows))
    columns = rows.column_names
    encoding = RowEncoding.of(source, tokenizer, data, kind, columns, rows[:8] and _build_rows(rows[:8]), key=key)
    token_rows = encoding.create_token_rows(TokenSpool(spool))
    token_rows.notes += list_source_notes(name, key, documents)
    unused = encoding.layout.unused(columns)
    token_rows.notes += list_media_notes(rows, unused)
    rows = rows.remove_columns(unused)
    location = functools.partial(locate_row, name, documents=documents, key=key)
    blocks = (_build_rows(rows[start : start + _BATCH]) for start in range(0, len(rows), _BATCH))
    for batch in iterate_batches(enumerate(chain.from_iterable(blocks))):
        encoding.take_in(batch, token_rows, location)
        report_progress(batch[-1][0] + 1, len(rows))
    if not len(token_rows):
        raise RequestError(f"{key}: {name}: {_explain_nothing_left(token_rows, data.targets)}")
    token_rows.notes += encoding.notes(unused)
    return token_rows


def iterate_batches(rows: Iterable[NumberedRow]) -> Iterator[list[NumberedRow]]:
    """Yield rows in batches of limited text: a tokenizer's output takes a hundred times the memory of its text."""
    batch: list[NumberedRow] = []
    characters = 0
    for index, row in rows:
        size = sum(len(value) for value in row.values() if isinstance(value, str))
        if batch and (len(batch) == _BATCH or characters + size > _BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append((index, row))
        characters += size
    if batch:
        yield batch


@dataclass(frozen=True)
class RowEncoding:
    """How the rows of one source become examples: their layout, and the encoder of their texts."""

    source: SourceSection
    data: DataSection
    kind: RowReader
    layout: RowLayout
    encoder: RowEncoder
    key: str

    @classmethod
    def of(
        cls,
        source: SourceSection,
        tokenizer: PreTrainedTokenizerBase,
        data: DataSection,
        kind: RowReader,
        columns: Sequence[str],
        first: Sequence[Row],
        *,
        key: str,
    ) -> RowEncoding:
        """Return the encoding of a source with these columns and first rows.

        Raises:
            RequestError: its layout is not known, or does not fit the recipe.
        """
        name = source.source
        layout = kind.layout(columns, first, source.rows, f"{key}: {name}")
        if data.example_per_turn and (kind.name != EXAMPLES.name or layout in PLAIN):
            raise RequestError(f"data.example_per_turn: is for conversations of task sft, but {name} has {layout} rows")
        if layout in PLAIN and data.targets not in ("answers", "all"):
            raise RequestError(f"data.targets: {data.targets} is for conversations, but {name} has {layout} rows")
        return cls(source, data, kind, layout, build_encoder(layout, tokenizer, data.targets), key)

    def create_token_rows(self, spool: TokenSpool) -> TokenRows:
        """Return an empty store of examples."""
        data, detected = self.data, (self.source.format == "auto" or isinstance(self.source.format, list))
        splits, drops = is_long_split(data.long_documents, self.layout), data.long_documents == "drop"
        return TokenRows(
            self.source.source,
            self.layout,
            data.max_length,
            detected,
            splits,
            spool,
            drops=drops,
            compares_targets=data.deduplicate,
        )

    def notes(self, unused: Sequence[str]) -> list[str]:
        """Return lines about the columns that are not used, and about what the encoder has changed so far."""
        lines = [f"{describe_unused_columns(unused)}; data.columns reads a column as a field"] if unused else []
        for setting in ("system", "drop_system_message"):
            if self.layout in PLAIN and getattr(self.source, setting):
                lines.append(f"data.{setting} has no effect on {self.layout} rows, which have no turns")
        remedies = describe_remedies(self.encoder.list_remedies(), accepted=self.data.accept_omissions)
        return [*lines, *self.encoder.notes, *remedies]

    def take_in(self, rows: Iterable[NumberedRow], token_rows: TokenRows, location: Callable[[int], str]) -> None:
        """Encode rows into ``token_rows``; ``location`` returns the file and line of a row for messages.

        Raises:
            RequestError: a row is wrong.
        """
        kind, key = self.kind, self.key
        texts: list[Any] = []
        owners: list[int] = []  # for each text, the index of its row in the source
        roles: dict[int, list[int]] = {}
        for index, row in rows:
            try:
                sequences = kind.sequences(row, token_rows.format, token_rows.remarks)
            except NoTarget as reason:
                token_rows.leave_out(str(reason))
                continue
            except RequestError as error:
                raise RequestError(f"{key}: {location(index)}: {error}") from None
            examples = split_by_turn(sequences) if self.data.example_per_turn else kind.split(sequences)
            roles[index] = [role for role, _ in examples[0]]
            texts += [text for example in examples for _, text in example]
            owners += [index] * sum(map(len, examples))
        remarks: list[set[str]] = [set() for _ in texts]
        try:
            encoded_texts = self.encoder.encode(texts, remarks)
        except TurnsError as error:
            raise RequestError(f"{key}: {location(owners[error.index])}: {error}") from None
        pairs = zip(owners, encoded_texts, remarks, strict=True)
        for index, several in groupby(pairs, lambda pair: pair[0]):
            of_row = list(several)
            group_size, answers = len(roles[index]), [sequence for _, sequence, _ in of_row]
            token_rows.add(
                index, [answers[at : at + group_size] for at in range(0, len(answers), group_size)], roles[index]
            )
            changes: set[str] = set().union(*(row_changes for _, _, row_changes in of_row))
            token_rows.encoding.add(changes, functools.partial(location, index))


def _explain_nothing_left(token_rows: TokenRows, targets: str) -> str:
    reasons = [f"{count:,}: {why}" for why, count in token_rows.left_out.items()]
    if token_rows.without_target:
        cut = (
            f"within data.max_length {format_plural(token_rows.max_length, 'token')}; the longest has "
            f"{token_rows.longest:,}"
        )
        if targets.startswith("/") and token_rows.longest <= token_rows.max_length:
            cut = f"because data.targets {targets} matches nothing in the text of the chat template"
        if not reasons:
            return f"none of {format_plural(token_rows.rows, 'row')} has a target {cut}"
        reasons.append(f"{token_rows.without_target:,}: no target {cut}")
    return f"none of {format_plural(token_rows.rows, 'row')} has a token to train on ({'; '.join(reasons)})"


def _build_rows(columns: dict[str, list[Any]]) -> list[Row]:
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
