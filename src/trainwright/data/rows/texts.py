"""The texts of a corpus for pretraining: read in pieces of bounded size, and encoded as tokens.

A text file is one document, or several separated by ``<|endoftext|>``, and is never loaded as a whole. Each row with
named fields is a document: its text, or the content of its turns. All tokens are targets, and the end-of-text token
follows. A text that was written with a chat template has the beginning and the end already, and gets no second one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from trainwright.data.rows.chat_encoding import ChatEncoder, Encoded
from trainwright.data.rows.formats import NoTarget
from trainwright.data.rows.layouts import MARKED, describe_unused_columns, list_columns
from trainwright.data.rows.marked import MarkedEncoder
from trainwright.data.rows.pairs import ANY
from trainwright.data.rows.tokenizer_calls import call_tokenizer
from trainwright.data.sources import row_files as document_files
from trainwright.data.sources.hub import resolve_alias
from trainwright.data.sources.reading import find_source_files, iterate_source, list_source_notes
from trainwright.data.sources.registry import split_slice
from trainwright.data.sources.row_files import Row, parse_suffix
from trainwright.data.sources.row_files import open_decompressed as opened_file
from trainwright.data.sources.shards import is_shards
from trainwright.errors import RequestError
from trainwright.recipe.sections.data import RowSettings, SourceSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    location: str
    text: str
    first: bool
    last: bool


def iterate_pieces(
    source: SourceSection, key: str, notes: list[str] | None = None, *, stream: bool = False
) -> Iterator[TextPiece]:
    """Yield the documents of ``source`` in order, always in the same pieces; empty ones are left out.

    Args:
        notes: collects messages about the source, such as unused columns.
        stream: see ``iterate_source``.

    Raises:
        RequestError: the source is missing, or not text (with the file and the byte offset).
    """
    if is_shards(source.source):
        raise RequestError(f"{key}: {source.source} is already tokenized; use the original text")
    count = -1
    for piece in _iterate_all_pieces(source, key, [] if notes is None else notes, stream):
        count += piece.first
        if source.limit is not None and count >= source.limit:
            return
        yield piece
    if count < 0:
        raise RequestError(f"{key}: {source.source} has no text")


def _iterate_all_pieces(source: SourceSection, key: str, notes: list[str], stream: bool) -> Iterator[TextPiece]:
    files = find_source_files(source.source, key, source.is_documents)
    if files is not None and all(parse_suffix(file) in _TEXT_FILES for file in files.files):
        if slice_ := split_slice(source.source)[1]:
            raise RequestError(f"{key}: {source.source}: {slice_} is for rows, and these files are text; use limit")
        for file in files.files if stream else files.usable():
            yield from _iterate_file_pieces(file)
        notes += [] if stream else list_source_notes(source.source, key, source.is_documents)
        return
    for location, text in _iterate_rows(source, key, notes, stream):
        yield from _cut(location, (text[at : at + _PIECE] for at in range(0, len(text), _PIECE)))


def _iterate_rows(source: SourceSection, key: str, notes: list[str], stream: bool) -> Iterator[tuple[str, str]]:
    """Yield rows as texts, without those that have no target."""
    name, documents = source.source, source.is_documents
    rows = join_documents(name, iterate_source(name, None, key, documents, stream=stream))
    first = list(islice(rows, 8))
    first_rows = [row for _, row in first]
    columns = list_columns(first_rows)
    layout = ANY.layout(columns, first_rows, RowSettings() if documents else source.rows, f"{key}: {name}")
    if layout.read_as:
        notes.append(f"{name}: {layout.read_as}")
    if unused := layout.unused(columns):
        notes.append(f"{name}: {describe_unused_columns(unused)}")
    for location, row in chain(first, rows):
        try:
            example = ANY.sequences(row, layout)[0][1]
        except NoTarget:
            continue
        except RequestError as error:
            raise RequestError(f"{location}: {error}") from None
        text = example if isinstance(example, str) else "\n\n".join(str(turn["content"]) for turn in example)
        if text.strip():
            yield location, text
    notes += [] if stream else list_source_notes(name, key, documents)


def join_documents(source: str, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Yield ``(location, row)`` of each document; if a corpus has one line per row, an article's lines are joined."""
    if resolve_alias(source).partition(":")[0] != _A_LINE_A_ROW:
        yield from rows
        return
    first_location, lines = "", list[str]()
    for location, row in rows:
        if not lines or (_TITLE.fullmatch(row["text"]) and not lines[-1].strip()):
            if lines:
                yield first_location, {"text": "".join(lines)}
            first_location, lines = location, []
        lines.append(row["text"] or "\n")
    if lines:
        yield first_location, {"text": "".join(lines)}


def _iterate_file_pieces(file: Path) -> Iterator[TextPiece]:
    """Yield the documents of a file, split at the separators."""
    parts = _iterate_parts(file)
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


def _iterate_parts(file: Path) -> Iterator[str]:
    """Yield the text of a file in parts; each separator is a separate part."""
    pending = ""
    for text in _decode_file(file):
        parts = (pending + text).split(SEPARATOR)
        for document in parts[:-1]:
            yield document
            yield SEPARATOR
        # The end may be the start of a separator, so it is kept for the next part.
        pending = parts[-1][-len(SEPARATOR) :]
        yield parts[-1][: len(parts[-1]) - len(pending)]
    yield pending


def _decode_file(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with opened_file(file) as stream:
        while True:
            raw = stream.read(_PIECE)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                raise RequestError(f"{file}: not UTF-8 text at byte {at:,}; save the file as UTF-8") from None
            if (null := raw.find(b"\0")) >= 0:
                raise RequestError(f"{file}: not text: a zero byte at {offset + null:,}; is it a binary file?")
            if not offset:
                text = text.removeprefix("\ufeff")
            offset += len(raw)
            if text:
                yield text
            if not raw:
                return


def _cut(location: str, parts: Iterator[str]) -> Iterator[TextPiece]:
    """Yield a document in pieces of about ``_PIECE`` characters, cut between tokens."""
    pending, first = "", True
    for part in parts:
        pending += part
        while len(pending) >= 2 * _PIECE:
            matches = (cut.search(pending, _PIECE) for cut in _CUTS)
            at = next((location.start() for location in matches if location), _PIECE)
            yield TextPiece(location, pending[:at], first, False)
            pending, first = pending[at:], False
    if not first or pending.strip():
        yield TextPiece(location, pending, first, True)


class TextEncoder:
    """Encodes texts with a tokenizer. ``notes`` has messages about it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.notes = [] if tokenizer.eos_token is not None else ["the tokenizer has no end-of-text token"]
        self._tokenizer = tokenizer
        self._ends = list_end_texts(tokenizer)

    def encode(self, texts: Sequence[str], remarks: Sequence[set[str]] | None = None) -> list[Encoded]:
        """Return ``(ids, targets)`` of each text.

        Args:
            remarks: for each text, collects what it has of a template, as verb phrases.
        """
        eos = self._tokenizer.eos_token_id
        stripped_texts = [text.rstrip() for text in texts]
        end_flags = [text.endswith(self._ends) for text in stripped_texts]
        # As in a conversation, white space after the end is not trained on.
        inputs = [short if ends else text for text, short, ends in zip(texts, stripped_texts, end_flags, strict=True)]
        encoded_texts = []
        for index, ids in enumerate(_encode_plain(self._tokenizer, inputs)):
            single = _drop_second_bos(ids, self._tokenizer.bos_token_id)
            if remarks is not None and len(single) < len(ids):
                remarks[index].add("begin with the beginning-of-text token, which is not added again")
            if remarks is not None and end_flags[index]:
                remarks[index].add("end with the end of a text or of a turn, after which no other is added")
            complete = single if eos is None or end_flags[index] or single[-1:] == [eos] else [*single, eos]
            encoded_texts.append((complete, [True] * len(complete)))
        return encoded_texts

    def list_remedies(self) -> list[str]:
        """Return nothing: every part of a text is encoded."""
        return []


RowEncoder: TypeAlias = ChatEncoder | TextEncoder | MarkedEncoder


def build_encoder(layout: str, tokenizer: PreTrainedTokenizerBase, targets: str) -> RowEncoder:
    """Return the encoder of the rows of a layout; ``targets`` is ``data.targets`` of a recipe."""
    if layout in MARKED:
        return MarkedEncoder(tokenizer, targets)
    return TextEncoder(tokenizer) if layout == "text" else ChatEncoder(tokenizer, targets)


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of texts, with the beginning-of-text token if the tokenizer prepends it, but not twice."""
    return [_drop_second_bos(ids, tokenizer.bos_token_id) for ids in _encode_plain(tokenizer, texts)]


def _encode_plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return list(call_tokenizer(tokenizer, texts, return_attention_mask=False, verbose=False)["input_ids"])


def _drop_second_bos(ids: list[int], bos: int | None) -> list[int]:
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def list_end_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of the tokens that end a text or an assistant turn."""
    return tuple(end for end in dict.fromkeys((tokenizer.eos_token, _stop_of_turns(tokenizer))) if end)


def _stop_of_turns(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that ends an assistant turn in the tokenizer's chat template, or "" if it has none."""
    if tokenizer.chat_template is None:
        return ""
    try:
        return ChatEncoder(tokenizer).stop.strip()
    except RequestError:  # a template that renders no conversation does not matter for texts
        return ""
