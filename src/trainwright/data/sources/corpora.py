"""Corpora by name: Hub datasets, and the standard library of the running Python interpreter."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainwright.data.sources.row_files import Row

# Names on the Hub, with configuration and split.
_OF_THE_HUB = {
    "openwebtext": "Skylion007/openwebtext",
    "wikitext": "Salesforce/wikitext:wikitext-103-raw-v1:train",
    "simple-wikipedia": "wikimedia/wikipedia:20231101.simple:train",
    "tinystories": "roneneldan/TinyStories",
    "orca-math": "microsoft/orca-math-word-problems-200k",
}
_A_LINE_A_ROW = "Salesforce/wikitext"
# The title of an article in that corpus; section titles have more equals signs.
_TITLE = re.compile(r" = (?!= ).+(?<! =) = \n")
# Directories of tests, installed packages and generated files.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "__phello__"}


def of_the_hub(source: str) -> str:
    """Return the Hub name of a corpus; other sources and existing paths are returned unchanged."""
    return source if source not in _OF_THE_HUB or Path(source).exists() else _OF_THE_HUB[source]


def whole_documents(source: str, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Yield ``(place, row)`` of each document; if a corpus has one line per row, the lines of an article are joined."""
    if of_the_hub(source).partition(":")[0] != _A_LINE_A_ROW:
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


def stdlib_rows() -> Iterator[dict[str, str]]:
    """Yield the standard library as rows ``{"text"}``: the source of every module, then the language reference topics.

    Sorted by name; equal interpreters give equal rows.
    """
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if text.strip():
                yield {"text": text}
    for name in sorted(topics):
        yield {"text": topics[name]}
