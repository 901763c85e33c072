"""The rows of a task: the layouts they may have, and how a row becomes the sequences of an example."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import Example, to_example
from trainwright.data.rows.layouts import SINGLE, RowLayout, layout_of
from trainwright.data.rows.pairs import to_labelled, to_pair
from trainwright.data.rows.turns import unread_fields
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.paths import user_path
from trainwright.recipe.files import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainwright.recipe.schema import Recipe


# The role of a sequence in its example.
FORGET, RETAIN, REFUSAL = 0, 1, 2


@dataclass(frozen=True)
class RowReader:
    """The rows of a task; ``layouts`` are names of ``layouts.REQUIRED`` in the order of detection."""

    name: str
    layouts: tuple[str, ...]

    def layout(self, columns: Sequence[str], first_rows: Sequence[Row], wanted: str) -> RowLayout:
        """Return the layout of a source's rows; raise RequestError if they fit none."""
        return layout_of(columns, first_rows, wanted, self.layouts)

    def sequences(self, row: Row, layout: RowLayout, remarks: Counter[str] | None = None) -> list[tuple[int, Example]]:
        """Return a row as ``(role, text or conversation)`` of each sequence of an example; rows have equally many.

        Raises:
            NoTarget, RequestError: as in ``formats.to_example``.
        """
        found = self._sequences(row, layout, remarks)
        if remarks is not None and (more := unread_fields(row, layout.used)):
            remarks[f"have fields in their turns that are not used: {', '.join(more)}"] += 1
        return found

    def _sequences(self, row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
        if layout == "preference":
            return list(to_pair(row, remarks, layout))
        if layout == "labelled":
            return list(to_labelled(row, remarks, layout))
        return [(0, to_example(row, layout, remarks))]


@dataclass(frozen=True)
class Refused(RowReader):
    """Conversations, each with a copy that ends in a refusal, such as "I do not know that.", as the answer to forget.

    The refusal of a row is selected from data.idk by the seed and the content of the row, so it is the same in every
    epoch, and the log-probabilities of the reference model are computed once.
    """

    refusals: tuple[str, ...] = ()
    seed: int = 0

    def sequences(self, row: Row, layout: RowLayout, remarks: Counter[str] | None = None) -> list[tuple[int, Example]]:
        """Return a row's conversation, and the same with a refusal as the answer."""
        ((_, example),) = super().sequences(row, layout, remarks)
        if isinstance(example, str):
            raise RequestError(
                "is plain text, but refusals answer questions; use conversations, or another unlearn.objective"
            )
        digest = hashlib.sha256(json.dumps([self.seed, example], sort_keys=True, default=str).encode()).digest()
        refusal = self.refusals[int.from_bytes(digest[:8], "big") % len(self.refusals)]
        return [(FORGET, example), (REFUSAL, [*example[:-1], {"role": "assistant", "content": refusal}])]


EXAMPLES = RowReader("examples", SINGLE)
PAIRS = RowReader("pairs", ("preference",))
ANSWERS = RowReader("answers", ("preference", "labelled"))
ANY = RowReader("any", ("preference", "labelled", *SINGLE))  # rows that do not belong to a task yet


_KINDS = {kind.name: kind for kind in (EXAMPLES, PAIRS, ANSWERS)}


def kind_of_rows(recipe: Recipe, key: str = "data.train") -> RowReader:
    """Return the kind of rows at ``key`` for the recipe's task; raise RequestError if data.idk cannot be read."""
    name = recipe.spec.rows(recipe, key)
    if name == "refused":
        return _refused(recipe)
    return _KINDS[name]


def _refused(recipe: Recipe) -> RowReader:
    """Return the kind of rows with the refusals of data.idk; raise RequestError if the file cannot be read."""
    assert recipe.data.idk is not None
    refusals, seed = read_refusals(recipe.data.idk), recipe.train.seed
    digest = hashlib.sha256(json.dumps([seed, *refusals]).encode()).hexdigest()[:16]
    return Refused(f"refused {digest}", EXAMPLES.layouts, refusals, seed)


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
    found = [_refusal(line.strip(), f"data.idk: {path}:{number}") for number, line in enumerate(lines, 1)]
    refusals = tuple(text for text in found if text)
    if not refusals:
        raise RequestError(f"data.idk: {path} has no refusals; write one per line, such as I do not know that.")
    return refusals


def _refusal(line: str, place: str) -> str:
    if not line.startswith(("{", '"')):
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = [one for one in value.values() if isinstance(one, str)] if isinstance(value, dict) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise RequestError(f"{place}: a refusal must be one text, not {len(texts)}")
    return texts[0].strip()
