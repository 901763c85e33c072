"""Check the data of a recipe by its first rows, before anything is launched. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from trainwright.data.rows.chat_templates import template_of
from trainwright.data.rows.formats import NoTarget, RowReader
from trainwright.data.rows.kinds import kind_of_rows
from trainwright.data.sources.reading import check_source, files_of, place_of
from trainwright.data.sources.registry import registered_source
from trainwright.errors import RequestError
from trainwright.paths import user_path

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe
    from trainwright.recipe.sections.data import SourceSection


def check_data(recipe: Recipe) -> None:
    """Check the first rows of every source. Hub datasets and histories are checked when they are prepared.

    Raises:
        RequestError: a source is missing or not parseable, its rows do not fit data.format or have no known layout, one
            of the first rows is wrong, or a chat template is invalid, or set for rows of plain text.
    """
    if not recipe.has_texts:
        return
    if recipe.spec.corpus:
        _check_corpus(recipe)
        return
    data = recipe.data
    named = list(zip(data.sources, data.source_keys, strict=True))
    if data.validation_source is not None:
        named.append((data.validation_source, "data.validation"))
    if recipe.model.chat_template is not None:
        template_of(recipe.model.chat_template)
    layouts = [_layout(source, key, kind_of_rows(recipe, key)) for source, key in named]
    refuse_unused_template(recipe.model.chat_template, layouts)


def refuse_unused_template(chat_template: str | None, layouts: Collection[str | None]) -> None:
    """Raise RequestError if ``chat_template`` is set and all ``layouts`` are text; None: not known yet."""
    if chat_template is not None and set(layouts) == {"text"}:
        raise RequestError("model.chat_template: has no effect on plain text rows; remove it, or use conversations")


def _layout(section: SourceSection, key: str, kind: RowReader) -> str | None:
    source, documents = section.source, section.format == "documents"
    registered = registered_source(source, key)
    rows = check_source(source, key, documents) if registered is None else [dict(registered.example)]
    rows = rows[: section.limit]
    if not rows:
        return None
    try:
        layout = kind.layout(list(dict.fromkeys(field for row in rows for field in row)), rows, section.format)
    except RequestError as error:
        raise RequestError(f"{key}: {source}: {error}") from None
    for index, row in enumerate(rows):
        try:
            kind.sequences(row, layout)
        except NoTarget:
            pass  # left out and counted when the data is prepared
        except RequestError as error:
            raise RequestError(f"{key}: {place_of(source, index, documents, key)}: {error}") from None
    return layout


def _check_corpus(recipe: Recipe) -> None:
    """Check that shards are complete and files are text. Hub datasets are checked when they are read."""
    from trainwright.data.rows.texts import pieces
    from trainwright.data.sources.shards import Shards, is_shards

    data = recipe.data
    named = list(zip(data.sources, data.source_keys, strict=True))
    if data.validation_source is not None:
        named.append((data.validation_source, "data.validation"))
    for source, key in named:
        if is_shards(source.source):
            Shards.open(user_path(source.source), key)
        elif files_of(source.source, key, source.format == "documents"):
            next(pieces(source, key))
