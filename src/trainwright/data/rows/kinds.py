"""The rows of a recipe's task, and the refusals and alternates that unlearning trains as answers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.data.rows.formats import EXAMPLES, Example, Message, NoTarget, RowReader, as_row
from trainwright.data.rows.layouts import RowLayout
from trainwright.data.rows.pairs import ANSWERS, PAIRS
from trainwright.data.sources.reading import iterate_source, source_notes
from trainwright.data.sources.row_files import Row, as_json, kind_of
from trainwright.errors import RequestError
from trainwright.recipe.files import read_text
from trainwright.utils.paths import user_path

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe


# The role of a sequence in its example; an alternate has the role of a refusal.
FORGET, RETAIN, REFUSAL = 0, 1, 2


def _with_alternates(row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
    """Return a row's conversation, and the same with each of its alternates, a text or a list of them, as the answer.

    Raises:
        NoTarget: it has no alternate.
    """
    ((_, example),) = EXAMPLES.convert(row, layout, remarks)
    if isinstance(example, str):
        raise RequestError(f"is plain text, but alternates answer questions; {_CONVERSATIONS}")
    (field,) = layout.extra
    value = row.get(field)
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"the field {field} should be a text or a list of texts, not {kind_of(value)}")
    if not (texts := [text for text in texts if text.strip()]):
        raise NoTarget(f"the field {field} is empty")
    return [(FORGET, example), *((REFUSAL, _answered(example, text)) for text in texts)]


def _one_alternate_each(sequences: list[tuple[int, Example]]) -> list[list[tuple[int, Example]]]:
    forget, *alternates = sequences
    return [[forget, alternate] for alternate in alternates]


def _answered(conversation: list[Message], answer: str) -> list[Message]:
    return [*conversation[:-1], {"role": "assistant", "content": answer}]


_CONVERSATIONS = "use conversations, or another unlearn.objective"
ALTERNATES = RowReader("alternates", EXAMPLES.layouts, _with_alternates, "alternate", _one_alternate_each)
_KINDS = {kind.name: kind for kind in (EXAMPLES, PAIRS, ANSWERS, ALTERNATES)}


def kind_of_rows(recipe: Recipe, key: str = "data.train") -> RowReader:
    """Return the kind of rows at ``key`` for the recipe's task; raise RequestError if data.idk cannot be read."""
    name = recipe.spec.rows(recipe, key)
    if name == "refused":
        return _refused(recipe)
    return _KINDS[name]


def _refused(recipe: Recipe) -> RowReader:
    """Return the reader of conversations, each with a copy that ends in a refusal of data.idk as the answer to forget.

    The refusal of a row, such as "I do not know that.", is selected by the seed and the content of the row, so it is
    the same in every epoch, and the log-probabilities of the reference model are computed once.

    Raises:
        RequestError: the file cannot be read.
    """
    assert recipe.data.idk is not None
    refusals, seed = read_refusals(recipe.data.idk), recipe.train.seed
    digest = hashlib.sha256(json.dumps([seed, *refusals]).encode()).hexdigest()[:16]
    return RowReader(
        f"refused {digest}", EXAMPLES.layouts, functools.partial(_with_refusal, refusals=refusals, seed=seed)
    )


def _with_refusal(
    row: Row, layout: RowLayout, remarks: Counter[str] | None, *, refusals: tuple[str, ...], seed: int
) -> list[tuple[int, Example]]:
    """Return a row's conversation, and the same with a refusal as the answer."""
    ((_, example),) = EXAMPLES.convert(row, layout, remarks)
    if isinstance(example, str):
        raise RequestError(f"is plain text, but refusals answer questions; {_CONVERSATIONS}")
    digest = hashlib.sha256(json.dumps([seed, example], sort_keys=True, default=str).encode()).digest()
    refusal = refusals[int.from_bytes(digest[:8], "big") % len(refusals)]
    return [(FORGET, example), (REFUSAL, _answered(example, refusal))]


def read_refusals(file: str) -> tuple[str, ...]:
    """Return the refusals in a file, one per line: plain text, or a JSON object with one text.

    Raises:
        RequestError: the file cannot be read or holds no refusals, or a line has several texts.
    """
    path = user_path(file)
    try:
        lines = read_text(path).splitlines()
    except RequestError as error:
        raise RequestError(f"data.idk: {error}") from None
    texts = [_refusal(line.strip(), f"data.idk: {path}:{number}") for number, line in enumerate(lines, 1)]
    refusals = tuple(text for text in texts if text)
    if not refusals:
        raise RequestError(f"data.idk: {path} has no refusals; write one per line, such as I do not know that.")
    return refusals


def _refusal(line: str, location: str) -> str:
    if not line.startswith(("{", '"')):
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = [one for one in value.values() if isinstance(one, str)] if isinstance(value, dict) else [value]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise RequestError(f"{location}: a refusal must be one text, not {len(texts)}")
    return texts[0].strip()


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
    try:
        layout = EXAMPLES.layout(
            list(dict.fromkeys(name for _, row in first for name in row)), [r for _, r in first], "auto"
        )
    except RequestError as error:
        raise RequestError(f"{source}: {error}") from None
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
