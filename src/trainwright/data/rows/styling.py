"""``trainwright data style``: conversations with a system prompt."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from trainwright.data.rows.formats import EXAMPLES, NoTarget, as_row
from trainwright.data.rows.layouts import columns_of
from trainwright.data.sources.reading import iterate_source, source_notes
from trainwright.data.sources.row_files import as_json
from trainwright.errors import RequestError
from trainwright.recipe.sections.data import RowSettings


@dataclass
class Styled:
    """Numbers of rows that were changed, kept and left out."""

    added: int = 0
    replaced: int = 0
    kept: int = 0  # with their own system turn
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)  # about how the rows were read


def style(source: str, system: str, out: Path, *, replace: bool) -> Styled:
    """Write the conversations of ``source`` as messages that start with ``system``; the file is written atomically.

    Columns that do not belong to the turns are kept.

    Args:
        replace: also replace existing system turns.

    Raises:
        RequestError: ``out`` exists, or the source or one of its rows is wrong or has no conversation.
    """
    if not system.strip():
        raise RequestError("--system: is empty; pass the text of a system turn, or @FILE")
    if not system.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in system):
        raise RequestError("--system: is not UTF-8 text; pass UTF-8, or @FILE")
    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new file")
    rows = iterate_source(source, key="data style")
    first = list(islice(rows, 8))
    first_rows = [row for _, row in first]
    layout = EXAMPLES.layout(columns_of(first_rows), first_rows, RowSettings(), source)
    if layout == "text":
        raise RequestError(f"{source}: the rows are plain text without turns, so they cannot have a system prompt")
    styled = Styled()
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            for location, row in chain(first, rows):
                try:
                    [(_, messages)] = EXAMPLES.sequences(row, layout)
                except NoTarget as reason:
                    styled.left_out[str(reason)] += 1
                    continue
                except RequestError as error:
                    raise RequestError(f"{location}: {error}") from None
                assert not isinstance(messages, str)
                if messages[0]["role"] != "system":
                    messages, styled.added = [{"role": "system", "content": system}, *messages], styled.added + 1
                elif replace:
                    messages, styled.replaced = [{**messages[0], "content": system}, *messages[1:]], styled.replaced + 1
                else:
                    styled.kept += 1
                more = {name: row[name] for name in layout.unused(list(row)) if name not in ("messages", "tools")}
                file.write(as_json({**as_row(messages), **more}) + "\n")
        scratch.rename(out)
        styled.notes += source_notes(source, "data style")
    finally:
        scratch.unlink(missing_ok=True)
    return styled
