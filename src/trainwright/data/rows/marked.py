"""Rows that mark their targets themselves, and that no chat template writes.

    segments    {"segments": [{"text", "label": true | false}, …]}          (Axolotl's input_output)
    tokens      {"input_ids"}, and optionally "labels", which are -100 where a token is no target (Hugging Face),
                "completion_mask" and "assistant_masks", which are 0 there (TRL), and "attention_mask", which is 0 where
                a token is padding and left out

Nothing is added to a row: neither a beginning-of-text token nor an end-of-text token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.data.rows.formats import EXAMPLES, NoTarget, RowReader, to_single_sequence
from trainwright.data.rows.layouts import MARKED, RowLayout
from trainwright.data.rows.tokenizer_calls import call_tokenizer
from trainwright.data.sources.row_files import Row, describe_type
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.data.rows.chat_encoding import Encoded

# A sequence in parts, each a text or token ids, with whether it is a target.
Marked: TypeAlias = tuple[tuple[str | tuple[int, ...], bool], ...]

_NOT_A_TARGET = -100


def _to_single_sequence(row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Any]]:
    if layout not in MARKED:
        return to_single_sequence(row, layout, remarks)
    parts = _read_segments(row, layout.column("segments")) if layout == "segments" else _read_tokens(row, layout)
    if not any(target for _, target in parts):
        raise NoTarget("no part of it is marked as a target")
    return [(0, parts)]


# Rows of any layout with one sequence each.
ANY_EXAMPLES = RowReader(EXAMPLES.name, (*EXAMPLES.layouts, *MARKED), _to_single_sequence)


def _read_segments(row: Row, field: str) -> Marked:
    segments = row.get(field)
    if not isinstance(segments, list) or not segments:
        description = "an empty list" if segments == [] else describe_type(segments)
        raise RequestError(f'the field {field} should be a list of {{"text": "…", "label": true}}, not {description}')
    return tuple(_read_segment(segment, f"{field}[{index}]") for index, segment in enumerate(segments))


def _read_segment(segment: Any, location: str) -> tuple[str, bool]:
    if not isinstance(segment, dict):
        raise RequestError(f"{location} should be an object with text and label, not {describe_type(segment)}")
    text, label = segment.get("text"), segment.get("label")
    if not isinstance(text, str):
        raise RequestError(f"{location}.text should be text, not {describe_type(text)}")
    if not isinstance(label, bool):
        raise RequestError(f"{location}.label should be true if the text is a target, otherwise false")
    return text, label


def _read_tokens(row: Row, layout: RowLayout) -> Marked:
    column = layout.column("input_ids")
    ids = _read_numbers(row, column)
    if not ids:
        raise RequestError(f"the field {column} should be a list of token ids, not empty")
    if min(ids) < 0:
        raise RequestError(f"{column} has {min(ids)}; a token id is 0 or more")
    flags, present = [True] * len(ids), [True] * len(ids)
    for field, mark in _MARKS.items():
        name = layout.column(field)
        if row.get(name) is None:
            continue
        marks = _read_numbers(row, name)
        if len(marks) != len(ids):
            raise RequestError(f"{name} has {len(marks):,} numbers for the {len(ids):,} tokens of {column}")
        mask = present if field == "attention_mask" else flags
        for at, (value, token) in enumerate(zip(marks, ids, strict=True)):
            mask[at] &= mark(value, token, f"{name}[{at}]")
    ids, flags = tuple(compress(ids, present)), list(compress(flags, present))
    begins = [at for at in range(len(ids)) if at == 0 or flags[at] != flags[at - 1]]
    return tuple((ids[at:end], flags[at]) for at, end in zip(begins, [*begins[1:], len(ids)], strict=True))


def _read_numbers(row: Row, field: str) -> tuple[int, ...]:
    values = row.get(field)
    if not isinstance(values, list):
        raise RequestError(f"the field {field} should be a list of whole numbers, not {describe_type(values)}")
    if (at := next((at for at, value in enumerate(values) if not isinstance(value, int)), None)) is not None:
        odd = repr(values[at]) if isinstance(values[at], float) else describe_type(values[at])
        raise RequestError(f"{field}[{at}] should be a whole number, not {odd}")
    return tuple(map(int, values))


def _parse_label(value: int, token: int, location: str) -> bool:
    if value not in (token, _NOT_A_TARGET):
        raise RequestError(f"{location} is {value}, and the token {token}; a label is its token or {_NOT_A_TARGET}")
    return value == token


def _parse_mask(value: int, token: int, location: str) -> bool:
    if value not in (0, 1):
        raise RequestError(f"{location} is {value}; expected 0 or 1")
    return value == 1


_MARKS = {
    "labels": _parse_label,
    "completion_mask": _parse_mask,
    "assistant_masks": _parse_mask,
    "attention_mask": _parse_mask,
}


class MarkedEncoder:
    """Encodes the parts of rows one by one, as they are.

    Args:
        targets: ``data.targets`` of a recipe: answers, the parts that are marked, or all.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: str = "answers") -> None:
        self.notes: list[str] = []
        self._tokenizer = tokenizer
        self._all = targets == "all"

    def encode(self, rows: Sequence[Marked], remarks: Sequence[set[str]] | None = None) -> list[Encoded]:
        """Return ``(ids, targets)`` of each row; ``remarks`` collects nothing, as rows are not changed."""
        texts = list(dict.fromkeys(part for row in rows for part, _ in row if isinstance(part, str)))
        ids: dict[Any, Sequence[int]] = {}
        if texts:
            encoding = call_tokenizer(
                self._tokenizer, texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            ids = dict(zip(texts, encoding["input_ids"], strict=True))
        return [self._encoded((ids.get(part, part), target) for part, target in row) for row in rows]

    def _encoded(self, parts: Iterable[tuple[Any, bool]]) -> Encoded:
        ids, targets = list[int](), list[bool]()
        for part, target in parts:
            ids += part
            targets += [target or self._all] * len(part)
        return ids, targets

    def list_remedies(self) -> list[str]:
        """Return nothing: every part is encoded."""
        return []
