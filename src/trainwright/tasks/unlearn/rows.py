"""Rows with other answers, which unlearning trains: a refusal, or alternates."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import EXAMPLES, Example, Message, NoTarget, RowReader
from trainwright.data.rows.layouts import RowLayout
from trainwright.data.sources.row_files import Row, kind_of
from trainwright.errors import RequestError
from trainwright.recipe.files import read_text
from trainwright.tasks.unlearn.section import data_of
from trainwright.utils.paths import user_path

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe


# The role of a sequence in its example; an alternate has the role of a refusal.
FORGET, RETAIN, REFUSAL = 0, 1, 2


def _with_alternates(row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
    """Return a row's conversation, and the same with each of its alternates, a text or a list of them, as the answer.

    Raises:
        NoTarget: it has no alternate.
    """
    ((_, example),) = EXAMPLES.convert(row, layout, remarks)
    if isinstance(example, str):
        raise RequestError(f"is plain text, but alternates answer questions; {_CONVERSATIONS}")
    (field,) = layout.extra
    value = row.get(field)
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"the field {field} should be a text or a list of texts, not {kind_of(value)}")
    if not (texts := [text for text in texts if text.strip()]):
        raise NoTarget(f"the field {field} is empty")
    return [(FORGET, example), *((REFUSAL, _answered(example, text)) for text in texts)]


def _one_alternate_each(sequences: list[tuple[int, Example]]) -> list[list[tuple[int, Example]]]:
    forget, *alternates = sequences
    return [[forget, alternate] for alternate in alternates]


def _answered(conversation: list[Message], answer: str) -> list[Message]:
    return [*conversation[:-1], {"role": "assistant", "content": answer}]


_CONVERSATIONS = "use conversations, or another unlearn.objective"
ALTERNATES = RowReader("alternates", EXAMPLES.layouts, _with_alternates, "alternate", _one_alternate_each)


def refused(recipe: Recipe) -> RowReader:
    """Return the reader of conversations, each with a copy that ends in a refusal of data.idk as the answer to forget.

    The refusal of a row, such as "I do not know that.", is selected by the seed and the content of the row, so it is
    the same in every epoch, and the log-probabilities of the reference model are computed once.

    Raises:
        RequestError: the file cannot be read.
    """
    file = data_of(recipe).idk
    assert file is not None
    refusals, seed = read_refusals(file), recipe.train.seed
    digest = hashlib.sha256(json.dumps([seed, *refusals]).encode()).hexdigest()[:16]
    return RowReader(
        f"refused {digest}", EXAMPLES.layouts, functools.partial(_with_refusal, refusals=refusals, seed=seed)
    )


def _with_refusal(
    row: Row, layout: RowLayout, remarks: Counter[str] | None, *, refusals: tuple[str, ...], seed: int
) -> list[tuple[int, Example]]:
    """Return a row's conversation, and the same with a refusal as the answer."""
    ((_, example),) = EXAMPLES.convert(row, layout, remarks)
    if isinstance(example, str):
        raise RequestError(f"is plain text, but refusals answer questions; {_CONVERSATIONS}")
    digest = hashlib.sha256(json.dumps([seed, example], sort_keys=True, default=str).encode()).digest()
    refusal = refusals[int.from_bytes(digest[:8], "big") % len(refusals)]
    return [(FORGET, example), (REFUSAL, _answered(example, refusal))]


def read_refusals(file: str) -> tuple[str, ...]:
    """Return the refusals in a file, one per line: plain text, or a JSON object with one text.

    Raises:
        RequestError: the file cannot be read or holds no refusals, or a line has several texts.
    """
    path = user_path(file)
    try:
        lines = read_text(path).splitlines()
    except RequestError as error:
        raise RequestError(f"data.idk: {error}") from None
    texts = [_refusal(line.strip(), f"data.idk: {path}:{number}") for number, line in enumerate(lines, 1)]
    refusals = tuple(text for text in texts if text)
    if not refusals:
        raise RequestError(f"data.idk: {path} has no refusals; write one per line, such as I do not know that.")
    return refusals


def _refusal(line: str, location: str) -> str:
    if not line.startswith(("{", '"')):
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = [one for one in value.values() if isinstance(one, str)] if isinstance(value, dict) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise RequestError(f"{location}: a refusal must be one text, not {len(texts)}")
    return texts[0].strip()
