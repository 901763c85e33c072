"""Refusals, such as "I do not know that.", in place of the answers that are to be forgotten.

The refusal of a row is drawn from data.idk by the seed and the row's own content, so it is the same in every epoch and
what the reference says of it is computed once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import Example
from trainwright.data.rows.kinds import EXAMPLES, Kind
from trainwright.data.rows.layouts import Layout
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.recipe.files import read_text

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

# What a document is to its example.
FORGET, RETAIN, REFUSAL = 0, 1, 2


@dataclass(frozen=True)
class Refused(Kind):
    """Conversations, each with the same one that ends in a refusal."""

    refusals: tuple[str, ...] = ()
    seed: int = 0

    def documents(self, row: Row, layout: Layout, remarks: Counter[str] | None = None) -> list[tuple[int, Example]]:
        """Return the example of a row with its refusal as the answer."""
        ((_, example),) = super().documents(row, layout, remarks)
        if isinstance(example, str):
            raise RequestError(
                "is plain text, and a refusal answers a question; use conversations, or another unlearn.objective"
            )
        digest = hashlib.sha256(json.dumps([self.seed, example], sort_keys=True, default=str).encode()).digest()
        refusal = self.refusals[int.from_bytes(digest[:8], "big") % len(self.refusals)]
        return [(FORGET, example), (REFUSAL, [*example[:-1], {"role": "assistant", "content": refusal}])]


def refused(recipe: Recipe) -> Kind:
    """Conversations with the refusals of data.idk. Raises RequestError where that cannot be read."""
    assert recipe.data.idk is not None
    refusals, seed = read_refusals(recipe.data.idk), recipe.train.seed
    digest = hashlib.sha256(json.dumps([seed, *refusals]).encode()).hexdigest()[:16]
    return Refused(f"refused {digest}", EXAMPLES.layouts, refusals, seed)


def read_refusals(file: str) -> tuple[str, ...]:
    """Return the refusals of a file, a line each: the line itself, or the one text of a JSON object.

    Raises:
        RequestError: the file cannot be read, has none, or a line has several texts.
    """
    path = Path(file).expanduser()
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
