"""Read files whole, each as one row ``{"text"}``: text, Markdown, code, and Word's ``.docx`` with an extra."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.data.sources.row_files import LocatedRow, read_text
from trainwright.errors import MachineError, RequestError
from trainwright.installation import install_command

if TYPE_CHECKING:
    from docx.table import Table

_DOCX = ".docx"
# Files that cannot hold other kinds of rows.
_CODE = """
    .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .swift .js .jsx .ts .tsx .rb .php .pl .lua .r
    .jl .hs .ml .ex .sh .sql .html .css .toml
""".split()  # noqa: SIM905 (a list of names reads better so)
ALONE = frozenset((*_CODE, _DOCX))
SUFFIXES = frozenset((*ALONE, ".txt", ".md"))


def document_files(directory: Path) -> list[Path]:
    """Return the documents in ``directory`` and its subdirectories, sorted by path, without hidden ones."""
    found = []
    for place, inside, names in os.walk(directory):
        inside[:] = [name for name in inside if not name.startswith(".") and name != "__pycache__"]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.suffix.lower() in SUFFIXES)


def read_document(path: Path) -> Iterator[LocatedRow]:
    """Yield the file as one row.

    Raises:
        RequestError: the file is not UTF-8 text or not a Word file.
        MachineError: python-docx is not installed.
    """
    yield 1, {"text": _docx(path) if path.suffix.lower() == _DOCX else read_text(path)}


def _docx(path: Path) -> str:
    """Return the text of a Word file: one line per paragraph and per table row, with tabs between the cells."""
    try:
        from docx import Document
        from docx.opc.exceptions import OpcError
        from docx.table import Table
    except ImportError:
        raise MachineError(f"{path}: Word files need python-docx; {install_command('docx')}") from None
    try:
        parts = list(Document(str(path)).iter_inner_content())
    except (OpcError, OSError, KeyError, ValueError) as error:
        raise RequestError(f"{path}: not a Word file: {error}") from None
    return "\n".join(_table(part) if isinstance(part, Table) else part.text for part in parts)


def _table(table: Table) -> str:
    return "\n".join("\t".join(cell.text for cell in row.cells) for row in table.rows)
