"""Check the rows of a source: all of them for a command, collecting the errors, or the first ones before a run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from trainwright.data.rows.chat_encoding import Encoded
from trainwright.data.rows.chat_templates import Remarks, describe_remedies, resolve_template
from trainwright.data.rows.formats import NoTarget, RowReader, look_up_reader, split_by_turn
from trainwright.data.rows.layouts import PLAIN, RowLayout, describe_unused_columns, list_columns
from trainwright.data.rows.tokenizer_calls import TokenizerError, check_token
from trainwright.data.sources.reading import (
    check_source,
    find_source_files,
    iterate_source,
    list_media_notes,
    list_source_notes,
    locate_row,
    read_rows,
)
from trainwright.data.sources.registry import find_registered_source
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_clause, format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.data.rows.texts import RowEncoder
    from trainwright.data.sources.shards import Shards
    from trainwright.recipe.schema import RecipeSchema
    from trainwright.recipe.sections.data import RowSettings, SourceSection


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
    encoding: Remarks = field(default_factory=Remarks)  # what their text or their template changes
    notes: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Count an invalid row, and keep the message if it is one of the first."""
        self.wrong += 1
        if len(self.problems) < _SHOWN:
            self.problems.append(text)

    def lines(self, max_length: int | None) -> list[str]:
        """Return the counts as lines of text."""
        token_text = f", {format_plural(self.tokens, 'token')}" if self.tokens else ""
        if self.layout == _CORPUS:
            documents = format_plural(self.examples, "document")
            return [f"{self.source}: {documents}{token_text}", *(f"  {note}" for note in self.notes)]
        rows, examples = format_plural(self.rows, "row"), format_plural(self.examples, "example")
        report = [f"{self.source}: {rows} of {self.layout}: {examples}{token_text}"]
        if self.longer:
            report.append(f"  {format_plural(self.longer, 'row')} longer than {max_length:,} tokens")
        report += [f"  {line}" for line in self.encoding.lines()]
        report += [f"  {note}" for note in self.notes]
        report += [f"  {format_plural(count, 'row')} left out: {why}" for why, count in self.left_out.items()]
        report += [f"  {format_clause(count, 'row', remark)}" for remark, count in self.remarks.items()]
        return report


def check_sources(
    recipe: RecipeSchema,
    kind: RowReader,
    tokenizer: PreTrainedTokenizerBase,
    embeddings: int | None = None,
    *,
    only_files: bool = False,
) -> list[Checked]:
    """Check the sources of a recipe's training and validation data, for a model with ``embeddings``.

    Args:
        only_files: pass over those of the Hub and built-in ones.
    """
    data, sources = recipe.data, recipe.data.keyed_sources
    if only_files:
        sources = [(item, key) for item, key in sources if find_source_files(item.source, key, item.is_documents)]
    if recipe.spec.corpus:
        return [check_corpus(source, tokenizer, embeddings, key=key) for source, key in sources]
    encoding = EncodingCheck(
        tokenizer, data.max_length, embeddings, data.example_per_turn, data.accept_omissions, data.targets
    )
    return [
        check_rows(source.source, kind, source.rows, key=key, limit=source.limit, encoding=encoding)
        for source, key in sources
    ]


@dataclass(frozen=True)
class EncodingCheck:
    """How rows are checked as tokens.

    Attributes:
        max_length: in tokens; longer rows are counted.
        embeddings: of the model; rows with other tokens are invalid.
        each_turn: whether each assistant turn is one example.
        accepted: whether the user accepts what the chat template leaves out.
        targets: ``data.targets``.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = None
    embeddings: int | None = None
    each_turn: bool = False
    accepted: bool = False
    targets: str = "answers"


def check_rows(
    source: str,
    kind: RowReader,
    settings: RowSettings,
    *,
    key: str,
    limit: int | None = None,
    encoding: EncodingCheck | None = None,
) -> Checked:
    """Read all of ``source`` and convert each row to an example and, with ``encoding``, to tokens.

    Invalid rows are collected. If a file cannot be parsed, this is one problem and the rest of it is not read.

    Args:
        settings: how its rows are read.
        key: names the source in messages.

    Raises:
        RequestError: the source is missing, or its rows have no known layout.
    """
    source_check = Checked(source)
    documents = settings.format == "documents"
    rows = iterate_source(source, limit, key, documents)
    first = list(islice(rows, 8))
    if not first:
        raise RequestError(f"{key}: {source} has no rows")
    first_rows = [row for _, row in first]
    columns = list_columns(first_rows)
    source_check.layout = kind.layout(columns, first_rows, settings, f"{key}: {source}")
    encoder = None
    if encoding is not None:
        from trainwright.data.rows.texts import build_encoder  # imports numpy

        encoder = build_encoder(source_check.layout, encoding.tokenizer, encoding.targets)
    try:
        all_rows = chain(first, rows)
        while batch := list(islice(all_rows, _BATCH)):
            columns = list(dict.fromkeys(chain(columns, *(row for _, row in batch))))
            _check_batch(batch, kind, source_check, encoder, encoding)
    except RequestError as error:  # an error of the file, not of a row
        source_check.problem(str(error))
    source_check.notes += list_source_notes(source, key, documents)
    layout = kind.layout(columns, first_rows, settings, f"{key}: {source}")  # of all rows, as in training
    if layout.read_as:
        source_check.notes.append(f"read: {layout.read_as}")
    if unused := layout.unused(columns):
        source_check.notes.append(f"{describe_unused_columns(unused)}; data.columns reads a column as a field")
    if encoder is not None and encoding is not None:
        source_check.notes += [*encoder.notes, *describe_remedies(encoder.list_remedies(), accepted=encoding.accepted)]
    if not source_check.wrong:  # check the types
        table = read_rows(source, limit, key, documents, functools.partial(kind.narrowing, settings))
        source_check.notes += list_media_notes(table, unused)
    return source_check


def check_corpus(
    source: SourceSection, tokenizer: PreTrainedTokenizerBase, embeddings: int | None = None, *, key: str
) -> Checked:
    """Read all of a corpus as pretraining does, and count its documents and tokens, for a model with ``embeddings``.

    Raises:
        RequestError: the source is missing, or shards are incomplete or of another tokenizer.
    """
    import numpy as np

    from trainwright.data.rows.texts import iterate_pieces
    from trainwright.data.sources.shards import Shards, is_shards
    from trainwright.data.tokens.shard_writer import build_settings
    from trainwright.data.tokens.token_worker import Encoder

    source_check = Checked(source.source, layout=_CORPUS)
    if is_shards(source.source):
        shards = Shards.open(expand_user_path(source.source), key)
        shards.check_tokenizer(tokenizer, key)
        source_check.examples, source_check.tokens = len(shards.ends), shards.token_count
        if wrong := check_shard_tokens(shards, tokenizer, embeddings):
            source_check.problem(wrong)
        return source_check
    settings = build_settings(tokenizer)
    encode = Encoder(settings)
    try:
        for piece in iterate_pieces(source, key, source_check.notes):
            tokens = np.frombuffer(encode([piece])[0], settings.dtype)
            source_check.tokens += len(tokens)
            source_check.examples += piece.last
            if wrong := check_token(int(tokens.max(initial=0)), tokenizer, embeddings):
                source_check.problem(f"{piece.location}: {wrong}")
    except RequestError as error:
        source_check.problem(str(error))
    return source_check


def check_shard_tokens(shards: Shards, tokenizer: PreTrainedTokenizerBase, embeddings: int | None) -> str | None:
    """Return a message with the document if a model with this number of embeddings has none for a token of a corpus.

    The tokens are only read if the tokenizer has such tokens.
    """
    if embeddings is None or len(tokenizer) <= embeddings:
        return None
    for begin, tokens in zip(shards.begins.tolist(), shards.files, strict=False):
        if len(tokens) and tokens.max() >= embeddings:
            position = int((tokens >= embeddings).argmax())
            document = int(shards.ends.searchsorted(begin + position, side="right")) + 1
            wrong = check_token(int(tokens[position]), tokenizer, embeddings)
            return f"{shards.directory}: document {document:,}: {wrong}"
    return None


def _check_batch(
    batch: list[tuple[str, Row]],
    kind: RowReader,
    checked: Checked,
    encoder: RowEncoder | None,
    check: EncodingCheck | None,
) -> None:
    entries: list[tuple[str, list[Any], int]] = []  # (location, sequences, sequences of an example)
    for location, row in batch:
        checked.rows += 1
        try:
            sequences = kind.sequences(row, checked.layout, checked.remarks)
        except NoTarget as reason:
            checked.left_out[str(reason)] += 1
            continue
        except RequestError as error:
            checked.problem(f"{location}: {error}")
            continue
        examples = split_by_turn(sequences) if check is not None and check.each_turn else kind.split(sequences)
        entries.append((location, [text for each in examples for _, text in each], len(examples[0])))
    if encoder is None or check is None:
        checked.examples += len(entries)
        return
    for (location, _, each), (encoded_row, remarks) in zip(entries, _encode_rows(entries, encoder), strict=True):
        if isinstance(encoded_row, RequestError):
            checked.problem(f"{location}: {encoded_row}")
            continue
        checked.encoding.add(remarks, functools.partial(str, location))
        tokens = [token for ids, _ in encoded_row for token in ids]
        if wrong := check_token(max(tokens, default=-1), check.tokenizer, check.embeddings):
            checked.problem(f"{location}: {wrong}")
            continue
        checked.examples += len(encoded_row) // each
        checked.tokens += len(tokens)
        longest = max(len(ids) for ids, _ in encoded_row)
        checked.longer += check.max_length is not None and longest > check.max_length


def _encode_rows(
    taken: list[tuple[str, list[Any], int]], encoder: RowEncoder
) -> Iterator[tuple[list[Encoded] | RequestError, set[str]]]:
    """Yield the encoding of each row and its remarks: all rows at once or, if that fails, one by one with errors."""
    texts = [text for _, row, _ in taken for text in row]
    remarks: list[set[str]] = [set() for _ in texts]
    try:
        pairs = iter(zip(encoder.encode(texts, remarks), remarks, strict=True))
    except TokenizerError:  # concerns all rows
        raise
    except RequestError:
        for _, row, _ in taken:
            changes: list[set[str]] = [set() for _ in row]
            try:
                yield encoder.encode(row, changes), set().union(*changes)
            except RequestError as error:
                yield error, set()
        return
    for _, row, _ in taken:
        encoded_row, changes = map(list, zip(*islice(pairs, len(row)), strict=True))
        yield encoded_row, set().union(*changes)


def check_data(recipe: RecipeSchema) -> None:
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
    if recipe.model.chat_template is not None:
        resolve_template(recipe.model.chat_template)
    sources = recipe.data.keyed_sources
    layouts = [_check_first_rows(source, key, look_up_reader(recipe, key)) for source, key in sources]
    refuse_unused_template(recipe.model.chat_template, layouts)


def refuse_unused_template(chat_template: str | None, layouts: Collection[str | None]) -> None:
    """Raise RequestError if ``chat_template`` is set and all ``layouts`` are plain; None: not known yet."""
    if chat_template is not None and layouts and {*layouts} <= {*PLAIN}:
        raise RequestError("model.chat_template: has no effect on rows of plain text, segments or tokens; remove it")


def _check_first_rows(section: SourceSection, key: str, kind: RowReader) -> str | None:
    source, documents = section.source, section.is_documents
    row_source = find_registered_source(source, key)
    rows = check_source(source, key, documents) if row_source is None else [dict(row_source.example)]
    rows = rows[: section.limit]
    if not rows:
        return None
    layout = kind.layout(list_columns(rows), rows, section.rows, f"{key}: {source}")
    for index, row in enumerate(rows):
        try:
            kind.sequences(row, layout)
        except NoTarget:
            pass  # left out and counted when the data is prepared
        except RequestError as error:
            raise RequestError(f"{key}: {locate_row(source, index, documents, key)}: {error}") from None
    return layout


def _check_corpus(recipe: RecipeSchema) -> None:
    """Check that shards are complete and files are text. Hub datasets are checked when they are read."""
    from trainwright.data.rows.texts import iterate_pieces
    from trainwright.data.sources.shards import Shards, is_shards

    for source, key in recipe.data.keyed_sources:
        if is_shards(source.source):
            Shards.open(expand_user_path(source.source), key)
        elif find_source_files(source.source, key, source.is_documents):
            next(iterate_pieces(source, key))
