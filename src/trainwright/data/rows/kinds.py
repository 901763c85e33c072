"""The rows of a task: the layouts they may have, and how a row becomes the documents of an example."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import Example, to_example
from trainwright.data.rows.layouts import SINGLE, Layout, layout_of
from trainwright.data.rows.pairs import to_labelled, to_pair
from trainwright.data.rows.turns import unread_fields
from trainwright.data.sources.row_files import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainwright.recipe.schema import Recipe


@dataclass(frozen=True)
class Kind:
    """The rows of a task; ``layouts`` are names of ``layouts.REQUIRED`` in the order of detection."""

    name: str
    layouts: tuple[str, ...]

    def layout(self, columns: Sequence[str], first_rows: Sequence[Row], wanted: str) -> Layout:
        """Return the layout of a source's rows; raise RequestError if they fit none."""
        return layout_of(columns, first_rows, wanted, self.layouts)

    def documents(self, row: Row, layout: Layout, remarks: Counter[str] | None = None) -> list[tuple[int, Example]]:
        """Return a row as ``(role, text or conversation)`` of each document of an example; rows have equally many.

        Raises:
            NoTarget, RequestError: as in ``formats.to_example``.
        """
        found = self._documents(row, layout, remarks)
        if remarks is not None and (more := unread_fields(row, layout.used)):
            remarks[f"have fields in their turns that are not used: {', '.join(more)}"] += 1
        return found

    def _documents(self, row: Row, layout: Layout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
        if layout == "preference":
            return list(to_pair(row, remarks, layout))
        if layout == "labelled":
            return list(to_labelled(row, remarks, layout))
        return [(0, to_example(row, layout, remarks))]


EXAMPLES = Kind("examples", SINGLE)
PAIRS = Kind("pairs", ("preference",))
ANSWERS = Kind("answers", ("preference", "labelled"))
ANY = Kind("any", ("preference", "labelled", *SINGLE))  # rows that do not belong to a task yet


_KINDS = {kind.name: kind for kind in (EXAMPLES, PAIRS, ANSWERS)}


def kind_of_rows(recipe: Recipe, key: str = "data.train") -> Kind:
    """Return the kind of rows at ``key`` for the recipe's task; raise RequestError if data.idk cannot be read."""
    name = recipe.spec.rows(recipe, key)
    if name == "refused":
        from trainwright.data.rows.refusals import refused

        return refused(recipe)
    return _KINDS[name]
