"""Refusals, such as "I do not know that.", in place of the answers to forget.

The refusal of a row is selected from data.idk by the seed and the content of the row, so it is the same in every epoch,
and the log-probabilities of the reference model are computed once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import Example
from trainwright.data.rows.kinds import EXAMPLES, Kind
from trainwright.data.rows.layouts import Layout
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.paths import user_path
from trainwright.recipe.files import read_text

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

# The role of a document in its example.
FORGET, RETAIN, REFUSAL = 0, 1, 2


@dataclass(frozen=True)
class Refused(Kind):
    """Conversations, each with a copy that ends in a refusal."""

    refusals: tuple[str, ...] = ()
    seed: int = 0

    def documents(self, row: Row, layout: Layout, remarks: Counter[str] | None = None) -> list[tuple[int, Example]]:
        """Return a row's conversation, and the same with a refusal as the answer."""
        ((_, example),) = super().documents(row, layout, remarks)
        if isinstance(example, str):
            raise RequestError(
                "is plain text, and a refusal answers a question; use conversations, or another unlearn.objective"
            )
        digest = hashlib.sha256(json.dumps([self.seed, example], sort_keys=True, default=str).encode()).digest()
        refusal = self.refusals[int.from_bytes(digest[:8], "big") % len(self.refusals)]
        return [(FORGET, example), (REFUSAL, [*example[:-1], {"role": "assistant", "content": refusal}])]


def refused(recipe: Recipe) -> Kind:
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
        raise RequestError(f"data.idk: {path} holds no refusal; write one a line, such as I do not know that.")
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
        raise RequestError(f"{place}: a refusal is one text, and here are {len(texts)}")
    return texts[0].strip()
