"""A source's rows as tokens and targets, with a count of all that happened to them on the way."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.data.dataset import TokenDataset
from trainwright.data.formats import NoTarget, unused_columns
from trainwright.data.kinds import Kind
from trainwright.data.row_files import Row
from trainwright.data.sources import place_of, read_rows
from trainwright.data.templates import ChatEncoder, Encoded, TurnsError, encode_texts
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.schema import DataSection

_BATCH = 256  # rows rendered and tokenised at a time


@dataclass
class TokenRows:
    """The examples of one source, each of the same number of documents.

    ``tokens``, ``targets`` and ``roles`` are of documents, in the order of the examples; ``hashes`` are of examples, of
    tokens and roles, and equal where these are.
    """

    source: str
    format: str
    max_length: int
    detected: bool
    rows: int = 0
    tokens: list[npt.NDArray[np.int32]] = field(default_factory=list)
    targets: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    truncated: int = 0
    cut_tokens: int = 0
    longest: int = 0  # before truncation
    without_target: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # rows that are no examples, by the reason in words
    remarks: Counter[str] = field(default_factory=Counter)  # rows that are not taken as they are, by what they do
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.hashes)

    def add(self, documents: Sequence[Encoded], roles: Sequence[int]) -> None:
        """Take one row in: cut its documents, and leave it out if nothing of one remains to be predicted."""
        self.rows += 1
        lengths = [len(ids) for ids, _ in documents]
        cut = [length - self.max_length for length in lengths if length > self.max_length]
        self.longest = max(self.longest, *lengths)
        self.truncated += bool(cut)
        self.cut_tokens += sum(cut)
        tokens = [np.asarray(ids[: self.max_length], dtype=np.int32) for ids, _ in documents]
        targets = [np.asarray(flags[: self.max_length], dtype=np.bool_) for _, flags in documents]
        if not all(flags[1:].any() for flags in targets):  # nothing precedes the first token to predict it from
            self.without_target += 1
            return
        self.tokens += tokens
        self.targets += targets
        self.roles += roles
        digest = hashlib.blake2b(digest_size=16)
        for ids, role in zip(tokens, roles, strict=True):
            digest.update(_header(len(ids), role) + ids.tobytes())
        self.hashes.append(digest.digest())

    def leave_out(self, why: str) -> None:
        """Count a row that has nothing to train on."""
        self.rows += 1
        self.left_out[why] += 1

    @property
    def duplicates(self) -> int:
        """Examples whose tokens an earlier one has."""
        return len(self.hashes) - len(set(self.hashes))

    def dataset(self, indices: Sequence[int]) -> TokenDataset:
        """Some of the examples; the fingerprint is of their tokens, targets and roles and of nothing else."""
        each = len(self.tokens) // len(self)
        kept = [index * each + place for index in indices for place in range(each)]
        tokens, targets, roles = ([values[i] for i in kept] for values in (self.tokens, self.targets, self.roles))
        digest = hashlib.sha256()
        for ids, flags, role in zip(tokens, targets, roles, strict=True):
            digest.update(_header(len(ids), role) + ids.astype("<i4").tobytes() + flags.tobytes())
        return TokenDataset(
            np.concatenate(tokens),
            np.concatenate(targets),
            np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            digest.hexdigest()[:32],
            self.report(),
            members=None if each == 1 else np.arange(len(kept), dtype=np.int64).reshape(-1, each),
            roles=np.asarray(roles, dtype=np.int8) if any(roles) else None,
        )

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
            f"longest {'row' if len(self) == len(self.tokens) else 'side'} {self.longest:,} tokens",
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
    source: str, tokenizer: PreTrainedTokenizerBase, data: DataSection, kind: Kind, *, key: str, limit: int | None
) -> TokenRows:
    """Read ``source`` and encode each row.

    Raises:
        RequestError: the source, its layout or a row is wrong (with the row's file and line), or no row has a
        target.
    """
    rows = read_rows(source, limit, key)
    columns = rows.column_names
    try:
        layout = kind.layout(columns, rows[:8] and _rows_of(rows[:8]), data.format)
    except RequestError as error:
        raise RequestError(f"{key}: {source}: {error}") from None
    found = TokenRows(source, layout, data.max_length, detected=data.format == "auto")
    if unused := unused_columns(columns, layout):
        found.notes.append(f"not used: the columns {', '.join(unused)}")
    rows = rows.remove_columns(unused)
    encoder = None if layout == "text" else ChatEncoder(tokenizer)
    encode = functools.partial(encode_texts, tokenizer) if encoder is None else encoder.encode
    for start in range(0, len(rows), _BATCH):
        _take_in(_rows_of(rows[start : start + _BATCH]), start, kind, found, encode, key)
    if not len(found):
        raise RequestError(f"{key}: {source}: {_nothing_left(found)}")
    found.notes += _encoder_notes(encoder) if encoder else _text_notes(tokenizer)
    return found


def _take_in(
    rows: list[Row], start: int, kind: Kind, found: TokenRows, encode: Callable[[list[Any]], list[Encoded]], key: str
) -> None:
    """Encode some rows, the first of them row ``start`` of the source, into ``found``."""
    texts: list[Any] = []
    owners: list[int] = []  # of the texts: the row's index in the source
    roles: dict[int, list[int]] = {}
    for index, row in enumerate(rows, start):
        try:
            documents = kind.documents(row, found.format, found.remarks)
        except NoTarget as reason:
            found.leave_out(str(reason))
            continue
        except RequestError as error:
            raise RequestError(f"{key}: {place_of(found.source, index)}: {error}") from None
        roles[index] = [role for role, _ in documents]
        texts += [text for _, text in documents]
        owners += [index] * len(documents)
    try:
        encoded = iter(encode(texts))
    except TurnsError as error:
        raise RequestError(f"{key}: {place_of(found.source, owners[error.index])}: {error}") from None
    for own in roles.values():
        found.add(list(islice(encoded, len(own))), own)


def _nothing_left(found: TokenRows) -> str:
    reasons = [f"{count:,}: {why}" for why, count in found.left_out.items()]
    if found.without_target:
        cut = f"within data.max_length {found.max_length:,} tokens; the longest has {found.longest:,}"
        if not reasons:
            return f"none of {found.rows:,} rows has a target {cut}"
        reasons.append(f"{found.without_target:,}: no target {cut}")
    return f"none of {found.rows:,} rows has anything to train on ({'; '.join(reasons)})"


def _header(length: int, role: int) -> bytes:
    """What tells where a document ends, and what it is."""
    return length.to_bytes(8, "little") + (role.to_bytes(1, "little") if role else b"")


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
