"""Corpora by name: of the Hub, and the running interpreter's own library, which every machine with Python has."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from trainwright.data.sources.row_files import Row

# Names on the Hub, with the configuration and the split.
_OF_THE_HUB = {
    "openwebtext": "Skylion007/openwebtext",
    "wikitext": "Salesforce/wikitext:wikitext-103-raw-v1:train",
    "simple-wikipedia": "wikimedia/wikipedia:20231101.simple:train",
    "tinystories": "roneneldan/TinyStories",
    "orca-math": "microsoft/orca-math-word-problems-200k",
}
_A_LINE_A_ROW = "Salesforce/wikitext"
# A title of that corpus; that of a section has more of the equals signs.
_TITLE = re.compile(r" = (?!= ).+(?<! =) = \n")
# Not the library proper: tests of it, what is installed beside it, what is generated.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "__phello__"}


def of_the_hub(source: str) -> str:
    """Return what a corpus is called on the Hub; any other source, and a path that is there, as it is."""
    return source if source not in _OF_THE_HUB or Path(source).exists() else _OF_THE_HUB[source]


def whole_documents(source: str, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """``(place, row)`` of each document: of a corpus that has a line a row, those of an article together."""
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
    """Yield the standard library as rows ``{"text"}``: every module's source, then the topics of the language
    reference.

    In the order of their names; equal for equal interpreters.
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
