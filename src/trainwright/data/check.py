"""Read and format every row of a source as training does, and collect the errors."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.bounded import TokenizerError
from trainwright.data.rows.formats import NoTarget, RowReader
from trainwright.data.rows.layouts import RowLayout, columns_not_used
from trainwright.data.sources.reading import iterate_source, read_rows, source_notes
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.paths import user_path
from trainwright.text import plural, they

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.data.rows.chat_encoding import Encoded
    from trainwright.recipe.schema import Recipe
    from trainwright.recipe.sections.data import SourceSection

_SHOWN = 20
_BATCH = 64
_CORPUS = RowLayout("corpus")  # for documents, which have no layout


@dataclass
class Checked:
    """The result for one source; ``problems`` are the first errors with their places, ``wrong`` counts all."""

    source: str
    layout: RowLayout = RowLayout("")  # noqa: RUF009
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    longer: int = 0  # than max_length
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Count an invalid row, and keep the message if it is one of the first."""
        self.wrong += 1
        if len(self.problems) < _SHOWN:
            self.problems.append(text)

    def lines(self, max_length: int | None) -> list[str]:
        """Return the counts as lines of text."""
        counted = f", {plural(self.tokens, 'token')}" if self.tokens else ""
        if self.layout == _CORPUS:
            documents = plural(self.examples, "document")
            return [f"{self.source}: {documents}{counted}", *(f"  {note}" for note in self.notes)]
        rows, examples = plural(self.rows, "row"), plural(self.examples, "example")
        found = [f"{self.source}: {rows} of {self.layout}: {examples}{counted}"]
        if self.longer:
            found.append(f"  {plural(self.longer, 'row')} longer than {max_length:,} tokens")
        found += [f"  {note}" for note in self.notes]
        found += [f"  {plural(count, 'row')} left out: {why}" for why, count in self.left_out.items()]
        found += [f"  {they(count, 'row', what)}" for what, count in self.remarks.items()]
        return found


def check_sources(recipe: Recipe, kind: RowReader, tokenizer: PreTrainedTokenizerBase) -> list[Checked]:
    """Check all sources of a recipe's training and validation data."""
    data = recipe.data
    sources = list(zip(data.source_keys, data.sources, strict=True))
    if data.validation_source is not None:
        sources.append(("data.validation", data.validation_source))
    if recipe.spec.corpus:
        return [check_corpus(one, tokenizer, key=key) for key, one in sources]
    asked: dict[str, Any] = {"tokenizer": tokenizer, "max_length": data.max_length}
    return [check_rows(one.source, kind, one.format, key=key, limit=one.limit, **asked) for key, one in sources]


def check_rows(
    source: str,
    kind: RowReader,
    wanted: str,
    *,
    key: str,
    limit: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
) -> Checked:
    """Read all of ``source`` and convert each row to an example and, with a ``tokenizer``, to tokens.

    Invalid rows are collected. If a file cannot be parsed, this is one problem and the rest of it is not read.

    Args:
        wanted: ``data.format``.
        key: names the source in messages.
        max_length: in tokens; longer rows are counted.

    Raises:
        RequestError: the source is missing, or its rows have no known layout.
    """
    found = Checked(source)
    documents = wanted == "documents"
    rows = iterate_source(source, limit, key, documents)
    first = list(islice(rows, 8))
    if not first:
        raise RequestError(f"{key}: {source} has no rows")
    columns = list(dict.fromkeys(name for _, row in first for name in row))
    layout_for = functools.partial(_layout, kind, [row for _, row in first], wanted, f"{key}: {source}")
    found.layout = layout_for(columns)
    encode = None if tokenizer is None else _encoder(tokenizer, found.layout)
    try:
        everything = chain(first, rows)
        while batch := list(islice(everything, _BATCH)):
            columns = list(dict.fromkeys(chain(columns, *(row for _, row in batch))))
            _check_batch(batch, kind, found, encode, max_length)
    except RequestError as error:  # an error of the file, not of a row
        found.problem(str(error))
    found.notes += source_notes(source, key, documents)
    layout = layout_for(columns)  # of all rows, as in training
    if layout.read_as:
        found.notes.append(f"read: {layout.read_as}")
    if unused := layout.unused(columns):
        found.notes.append(f"{columns_not_used(unused)}; data prepare --map reads a column as a field")
    if not found.wrong:
        read_rows(source, limit, key, documents)  # checks that each column has one type
    return found


def check_corpus(source: SourceSection, tokenizer: PreTrainedTokenizerBase, *, key: str) -> Checked:
    """Read all of a corpus as pretraining does, and count its documents and tokens.

    Raises:
        RequestError: the source is missing, or shards are incomplete or of another tokenizer.
    """
    from trainwright.data.rows.texts import pieces
    from trainwright.data.sources.shards import Shards, is_shards
    from trainwright.data.tokens.shard_writer import settings_of
    from trainwright.data.tokens.token_worker import Encoder

    found = Checked(source.source, layout=_CORPUS)
    if is_shards(source.source):
        shards = Shards.open(user_path(source.source), key)
        shards.check_tokenizer(tokenizer, key)
        found.examples, found.tokens = len(shards.ends), shards.token_count
        return found
    encode = Encoder(settings_of(tokenizer))
    try:
        for piece in pieces(source, key, found.notes):
            found.tokens += sum(encode([piece])[1])
            found.examples += piece.last
    except RequestError as error:
        found.problem(str(error))
    return found


Encode = Callable[[list[Any]], "list[Encoded]"]


def _encoder(tokenizer: PreTrainedTokenizerBase, layout: str) -> Encode:
    from trainwright.data.rows.chat_encoding import ChatEncoder, encode_texts

    return functools.partial(encode_texts, tokenizer) if layout == "text" else ChatEncoder(tokenizer).encode


def _layout(kind: RowReader, first: list[Row], wanted: str, where: str, columns: list[str]) -> RowLayout:
    try:
        return kind.layout(columns, first, wanted)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None


def _check_batch(
    batch: list[tuple[str, Row]], kind: RowReader, found: Checked, encode: Encode | None, max_length: int | None
) -> None:
    taken: list[tuple[str, list[Any]]] = []
    for place, row in batch:
        found.rows += 1
        try:
            taken.append((place, [text for _, text in kind.sequences(row, found.layout, found.remarks)]))
        except NoTarget as reason:
            found.left_out[str(reason)] += 1
        except RequestError as error:
            found.problem(f"{place}: {error}")
    if encode is None:
        found.examples += len(taken)
        return
    for place, encoded in _encoded(taken, encode):
        if isinstance(encoded, RequestError):
            found.problem(f"{place}: {encoded}")
            continue
        lengths = [len(ids) for ids, _ in encoded]
        found.examples += 1
        found.tokens += sum(lengths)
        found.longer += max_length is not None and max(lengths) > max_length


def _encoded(taken: list[tuple[str, list[Any]]], encode: Encode) -> Iterator[tuple[str, list[Encoded] | RequestError]]:
    """Yield the encoding of each row: all rows at once or, if that fails, one by one with the errors."""
    try:
        all_of_them = iter(encode([text for _, texts in taken for text in texts]))
    except TokenizerError:  # concerns all rows
        raise
    except RequestError:
        for place, texts in taken:
            try:
                yield place, encode(texts)
            except RequestError as error:
                yield place, error
        return
    for place, texts in taken:
        yield place, list(islice(all_of_them, len(texts)))
