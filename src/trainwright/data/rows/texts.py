"""Read the texts of a corpus for pretraining, in pieces of bounded size.

A text file is one document, or several separated by ``<|endoftext|>``, and is never loaded as a whole. Each row with
named fields is a document: its text, or the content of its turns.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainwright.data.rows.formats import NoTarget
from trainwright.data.rows.layouts import columns_not_used
from trainwright.data.rows.pairs import ANY
from trainwright.data.sources import documents as document_files
from trainwright.data.sources.hub import without_alias
from trainwright.data.sources.opening import opened as opened_file
from trainwright.data.sources.opening import suffix_of
from trainwright.data.sources.reading import files_of, iterate_source, source_notes
from trainwright.data.sources.row_files import Row
from trainwright.data.sources.shards import is_shards
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from trainwright.recipe.sections.data import SourceSection

SEPARATOR = "<|endoftext|>"
VERSION = 4  # raised when the documents, pieces or tokens of a corpus change
_PIECE = 2**17  # characters; tokenizers use up to 200 bytes of memory per character
_TEXT_FILES = frozenset((*document_files.SUFFIXES, ".txt", ".md")) - {".docx"}
# Byte-level BPE always starts a new word between a line end and a letter or digit, so a cut there changes no token. In
# very long lines the same holds before a single space.
_CUTS = re.compile(r"(?<=[^\s]\n)(?=\w)"), re.compile(r"(?<=\S)(?= \w)")

_A_LINE_A_ROW = "Salesforce/wikitext"
# The title of an article in that corpus; section titles have more equals signs.
_TITLE = re.compile(r" = (?!= ).+(?<! =) = \n")


class TextPiece(NamedTuple):
    """A part of a document. ``first`` and ``last``: whether it contains the document's start and end."""

    place: str
    text: str
    first: bool
    last: bool


def pieces(source: SourceSection, key: str, notes: list[str] | None = None) -> Iterator[TextPiece]:
    """Yield the documents of ``source`` in order, always in the same pieces; empty ones are left out.

    Args:
        notes: collects messages about the source, such as unused columns.

    Raises:
        RequestError: the source is missing, or not text (with the file and the byte offset).
    """
    if is_shards(source.source):
        raise RequestError(f"{key}: {source.source} is already tokenized; use the original text")
    count = -1
    for piece in _all_pieces(source, key, [] if notes is None else notes):
        count += piece.first
        if source.limit is not None and count >= source.limit:
            return
        yield piece
    if count < 0:
        raise RequestError(f"{key}: {source.source} has no text")


def _all_pieces(source: SourceSection, key: str, notes: list[str]) -> Iterator[TextPiece]:
    found = files_of(source.source, key, source.format == "documents")
    if found is not None and all(suffix_of(file) in _TEXT_FILES for file in found.files):
        for file in found.usable():
            yield from _file_pieces(file)
        notes += source_notes(source.source, key, source.format == "documents")
        return
    for place, text in _rows(source, key, notes):
        yield from _cut(place, (text[at : at + _PIECE] for at in range(0, len(text), _PIECE)))


def _rows(source: SourceSection, key: str, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield rows as texts, without those that have no target."""
    name, documents = source.source, source.format == "documents"
    rows = join_documents(name, iterate_source(name, None, key, documents))
    first = list(islice(rows, 8))
    columns = list(dict.fromkeys(field for _, row in first for field in row))
    wanted = "auto" if source.format == "documents" else source.format
    try:
        layout = ANY.layout(columns, [row for _, row in first], wanted)
    except RequestError as error:
        raise RequestError(f"{key}: {name}: {error}") from None
    if layout.read_as:
        notes.append(f"{name}: {layout.read_as}")
    if unused := layout.unused(columns):
        notes.append(f"{name}: {columns_not_used(unused)}")
    for place, row in chain(first, rows):
        try:
            example = ANY.sequences(row, layout)[0][1]
        except NoTarget:
            continue
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from None
        text = example if isinstance(example, str) else "\n\n".join(str(turn["content"]) for turn in example)
        if text.strip():
            yield place, text
    notes += source_notes(name, key, documents)


def join_documents(source: str, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Yield ``(place, row)`` of each document; if a corpus has one line per row, the lines of an article are joined."""
    if without_alias(source).partition(":")[0] != _A_LINE_A_ROW:
        yield from rows
        return
    begun, lines = "", list[str]()
    for place, row in rows:
        if not lines or (_TITLE.fullmatch(row["text"]) and not lines[-1].strip()):
            if lines:
                yield begun, {"text": "".join(lines)}
            begun, lines = place, []
        lines.append(row["text"] or "\n")
    if lines:
        yield begun, {"text": "".join(lines)}


def _file_pieces(file: Path) -> Iterator[TextPiece]:
    """Yield the documents of a file, split at the separators."""
    parts = _parts(file)
    number, ended = 1, False

    def until_separator() -> Iterator[str]:
        nonlocal ended
        ended = True
        for text in parts:
            if text == SEPARATOR:
                ended = False
                return
            yield text

    while not ended:
        yield from _cut(f"{file}: document {number}", until_separator())
        number += 1


def _parts(file: Path) -> Iterator[str]:
    """Yield the text of a file in parts; each separator is a separate part."""
    kept = ""
    for text in _decoded(file):
        found = (kept + text).split(SEPARATOR)
        for done in found[:-1]:
            yield done
            yield SEPARATOR
        # The end may be the start of a separator, so it is kept for the next part.
        kept = found[-1][-len(SEPARATOR) :]
        yield found[-1][: len(found[-1]) - len(kept)]
    yield kept


def _decoded(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with opened_file(file) as opened:
        while True:
            raw = opened.read(_PIECE)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                at = done - pending + error.start
                raise RequestError(f"{file}: not UTF-8 text at byte {at:,}; save the file as UTF-8") from None
            if (null := raw.find(b"\0")) >= 0:
                raise RequestError(f"{file}: not text: a zero byte at {done + null:,}; is it a binary file?")
            if not done:
                text = text.removeprefix("\ufeff")
            done += len(raw)
            if text:
                yield text
            if not raw:
                return


def _cut(place: str, parts: Iterator[str]) -> Iterator[TextPiece]:
    """Yield a document in pieces of about ``_PIECE`` characters, cut between tokens."""
    kept, first = "", True
    for part in parts:
        kept += part
        while len(kept) >= 2 * _PIECE:
            found = (cut.search(kept, _PIECE) for cut in _CUTS)
            at = next((place.start() for place in found if place), _PIECE)
            yield TextPiece(place, kept[:at], first, False)
            kept, first = kept[at:], False
    if not first or kept.strip():
        yield TextPiece(place, kept, first, True)
