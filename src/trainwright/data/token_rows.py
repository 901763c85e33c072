"""A source's rows as tokens and targets, with a count of all that happened to them on the way."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.data.dataset import TokenDataset
from trainwright.data.formats import NoTarget, layout_of, to_example, unused_columns
from trainwright.data.row_files import Row
from trainwright.data.sources import place_of, read_rows
from trainwright.data.templates import ChatEncoder, TurnsError, encode_texts
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.schema import DataSection

_BATCH = 256  # rows rendered and tokenised at a time


@dataclass
class TokenRows:
    """The examples of one source. ``hashes`` are of the tokens; equal examples have equal ones."""

    source: str
    format: str
    max_length: int
    detected: bool
    rows: int = 0
    tokens: list[npt.NDArray[np.int32]] = field(default_factory=list)
    targets: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    truncated: int = 0
    cut_tokens: int = 0
    longest: int = 0  # before truncation
    without_target: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # rows that are no examples, by the reason in words
    remarks: Counter[str] = field(default_factory=Counter)  # rows that are not taken as they are, by what they do
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, ids: list[int], flags: list[bool]) -> None:
        """Take one row in: cut it, and leave it out if nothing remains to be predicted."""
        self.rows += 1
        self.longest = max(self.longest, len(ids))
        if len(ids) > self.max_length:
            self.truncated += 1
            self.cut_tokens += len(ids) - self.max_length
        tokens = np.asarray(ids[: self.max_length], dtype=np.int32)
        targets = np.asarray(flags[: self.max_length], dtype=np.bool_)
        if not targets[1:].any():  # nothing precedes the first token to predict it from
            self.without_target += 1
            return
        self.tokens.append(tokens)
        self.targets.append(targets)
        self.hashes.append(hashlib.blake2b(tokens.tobytes(), digest_size=16).digest())

    def leave_out(self, why: str) -> None:
        """Count a row that has nothing to train on."""
        self.rows += 1
        self.left_out[why] += 1

    @property
    def duplicates(self) -> int:
        """Examples whose tokens an earlier one has."""
        return len(self.hashes) - len(set(self.hashes))

    def dataset(self, indices: Sequence[int]) -> TokenDataset:
        """Some of the examples; the fingerprint is of their tokens and targets and of nothing else."""
        tokens, targets = [self.tokens[i] for i in indices], [self.targets[i] for i in indices]
        digest = hashlib.sha256()
        for ids, flags in zip(tokens, targets, strict=True):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i4").tobytes() + flags.tobytes())
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        joined = np.concatenate(tokens), np.concatenate(targets)
        return TokenDataset(*joined, offsets, digest.hexdigest()[:32], self.report())

    def report(self) -> dict[str, Any]:
        """The counts, over the whole source."""
        return {
            "source": self.source,
            "format": self.format,
            "rows": self.rows,
            "examples": len(self),
            "tokens": sum(map(len, self.tokens)),
            "target_tokens": sum(int(flags[1:].sum()) for flags in self.targets),
            "longest": self.longest,
            "truncated": self.truncated,
            "cut_tokens": self.cut_tokens,
            "without_target": self.without_target,
            "left_out": dict(self.left_out),
            "duplicates": self.duplicates,
        }

    def summary(self, name: str) -> list[str]:
        """The counts as lines for people."""
        count = self.report()
        how = "found from the first rows" if self.detected else "as data.format says"
        lines = [
            f"{name}: {self.source}, {self.rows:,} rows of {self.format} ({how})",
            f"{name}: {count['tokens']:,} tokens, {count['target_tokens']:,} of them targets; "
            f"longest row {self.longest:,} tokens",
        ]
        if self.truncated:
            lines.append(
                f"{name}: {self.truncated:,} of {self.rows:,} rows cut to data.max_length "
                f"{self.max_length:,}, {self.cut_tokens:,} tokens lost"
            )
        if self.without_target:
            lines.append(f"{name}: {self.without_target:,} rows left out, as they have no target in what is kept")
        lines += [f"{name}: {count:,} rows left out: {why}" for why, count in self.left_out.items()]
        lines += [f"{name}: {count:,} rows {what}" for what, count in self.remarks.items()]
        if self.duplicates:
            lines.append(f"{name}: {self.duplicates:,} rows repeat an earlier one token by token; they are kept")
        return lines + [f"{name}: {note}" for note in self.notes]


def tokenize_source(
    source: str, tokenizer: PreTrainedTokenizerBase, data: DataSection, *, key: str, limit: int | None
) -> TokenRows:
    """Read ``source`` and encode each row.

    Raises:
        RequestError: the source, its layout or a row is wrong (with the row's file and line), or no row has a
        target.
    """
    rows = read_rows(source, limit, key)
    columns = rows.column_names
    try:
        layout = layout_of(columns, rows[:8] and _rows_of(rows[:8]), data.format)
    except RequestError as error:
        raise RequestError(f"{key}: {source}: {error}") from None
    found = TokenRows(source, layout, data.max_length, detected=data.format == "auto")
    if unused := unused_columns(columns, layout):
        found.notes.append(f"not used: the columns {', '.join(unused)}")
    rows = rows.remove_columns(unused)
    encoder = None if layout == "text" else ChatEncoder(tokenizer)
    for start in range(0, len(rows), _BATCH):
        examples = _examples(_rows_of(rows[start : start + _BATCH]), start, found, key)
        try:
            texts = list(examples.values())
            encoded = encode_texts(tokenizer, texts) if encoder is None else encoder.encode(texts)
        except TurnsError as error:
            raise RequestError(f"{key}: {place_of(source, list(examples)[error.index])}: {error}") from None
        for ids, flags in encoded:
            found.add(ids, flags)
    if not len(found):
        raise RequestError(f"{key}: {source}: {_nothing_left(found)}")
    found.notes += _encoder_notes(encoder) if encoder else _text_notes(tokenizer)
    return found


def _examples(rows: list[Row], start: int, found: TokenRows, key: str) -> dict[int, Any]:
    """What is to be encoded, by the row's index in the source; ``found`` counts what has nothing to train on."""
    examples = {}
    for index, row in enumerate(rows, start):
        try:
            examples[index] = to_example(row, found.format, found.remarks)
        except NoTarget as reason:
            found.leave_out(str(reason))
        except RequestError as error:
            raise RequestError(f"{key}: {place_of(found.source, index)}: {error}") from None
    return examples


def _nothing_left(found: TokenRows) -> str:
    reasons = [f"{count:,}: {why}" for why, count in found.left_out.items()]
    if found.without_target:
        cut = f"within data.max_length {found.max_length:,} tokens; the longest has {found.longest:,}"
        if not reasons:
            return f"none of {found.rows:,} rows has a target {cut}"
        reasons.append(f"{found.without_target:,}: no target {cut}")
    return f"none of {found.rows:,} rows has anything to train on ({'; '.join(reasons)})"


def _encoder_notes(encoder: ChatEncoder) -> list[str]:
    if not encoder.folded:
        return encoder.notes
    return [
        *encoder.notes,
        f"the chat template of {encoder.name} takes no system turn: in {encoder.folded:,} rows its text is "
        "put before the first user turn",
    ]


def _text_notes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [] if tokenizer.eos_token is not None else ["the tokenizer has no end-of-text token to end a text with"]


def _rows_of(columns: dict[str, list[Any]]) -> list[Row]:
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
