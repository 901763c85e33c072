"""Alternate answers of the rows to forget, which AltPO prefers to those of the rows, written by the model itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from trainwright.api.generation import generate
from trainwright.api.recipe import Recipe, source_of
from trainwright.errors import RequestError
from trainwright.utils.paths import user_path, write_file
from trainwright.utils.text import plural, say

FIELD = "alternate"
# A part is answered and written at once; where parts begin, with the seed, determines the answers.
_PART = 100  # rows
# The idea of the prompts of AltPO (arXiv 2409.13474): the model sees the answer, and makes up another one.
_PROMPT = """\
Question: {question}
Answer: {answer}

Invent a different answer to this question. It must be plausible, must contradict every fact that is stated only in \
the answer above, and must keep what the question says. Reply with the new answer only.

New answer:"""
_NEXT_QUESTION = re.compile(r"\b(?:Question|Q):")  # a model that continues texts goes on with another one


def alternates(
    recipe: Recipe | str | PathLike[str],
    *overrides: str,
    out: str | PathLike[str],
    count: int = 5,
    temperature: float = 1.0,
    max_new_tokens: int = 200,
    seed: int = 0,
    batch_size: int | None = None,
    num_processes: int | None = None,
    progress: bool = False,
) -> Path:
    """Let a recipe's model write other answers to its rows to forget; what ``trainwright data alternates`` does.

    Writes every row of ``data.forget`` with the list of its answers as ``alternate``, to use as ``data.forget`` with
    ``unlearn.objective: altpo``. If it is stopped, the same call continues after the rows that are written.

    Args:
        recipe: a `Recipe`, or the path of a recipe file, with task ``unlearn``.
        overrides: ``section.key=value``, the value in YAML.
        out: the file to write, JSON lines.
        count: alternates for each row.
        temperature: of the sampling.
        max_new_tokens: the maximum length of an alternate, in tokens.
        seed: of the sampling.
        batch_size: answers generated at once.
        num_processes: default: one per GPU, or one.
        progress: show how many are written.

    Returns:
        The path of the file.

    Raises:
        RequestError: the recipe or a row is invalid, or the file has other rows.
        MachineError: the model does not fit this machine.
        Stopped: it was stopped by a signal.

    Examples:
        >>> import trainwright as tw
        >>> tw.alternates("sft.yaml", out="alternates.jsonl")
        Traceback (most recent call last):
            ...
        trainwright.errors.RequestError: sft.yaml: ...
    """
    from trainwright.recipe.loading import load_recipe
    from trainwright.tasks.unlearn.section import data_of

    source = source_of(recipe)
    loaded = load_recipe(source, overrides)
    data = data_of(loaded)
    if data.forget is None or loaded.model.name is None:
        raise RequestError(f"{source}: alternates need a recipe with data.forget and the model.name that writes them")
    rows = list(_rows(data.forget, data.limit, data.format))
    file = user_path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    written = _written(file, [row for row, _ in rows], count)
    for start in range(len(written), len(rows), _PART):
        part = rows[start : start + _PART]
        prompts = [[{"role": "user", "content": prompt}] for _, prompt in part for _ in range(count)]
        texts = generate(
            loaded.model.name,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed + start,
            batch_size=batch_size,
            num_processes=num_processes,
            progress=progress,
        )
        answers = [_NEXT_QUESTION.split(text)[0].strip() for text in texts]
        for at, (row, _) in enumerate(part):
            written.append({**row, FIELD: answers[at * count : (at + 1) * count]})
        write_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written))
        if progress:
            say(f"{file}: {len(written):,} of {plural(len(rows), 'row')}")
    return file


def _rows(source: str, limit: int | None, required: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row with an answer, and its prompt. Raises RequestError if a row is no question with an answer."""
    from trainwright.data.rows.formats import EXAMPLES, NoTarget
    from trainwright.data.sources.reading import iterate_source
    from trainwright.recipe.sections.data import RowSettings

    key, layout = "data.forget", None
    for location, row in iterate_source(source, limit, key):
        try:
            layout = layout or EXAMPLES.layout(list(row), [row], RowSettings(required))
            ((_, example),) = EXAMPLES.sequences(row, layout)
            if isinstance(example, str):
                raise RequestError("is plain text, but alternates answer questions")
        except NoTarget:
            continue  # as in training
        except RequestError as error:
            raise RequestError(f"{key}: {location}: {error}") from None
        question = next(turn["content"] for turn in reversed(example) if turn["role"] == "user")
        yield row, _PROMPT.format(question=question, answer=example[-1]["content"])


def _written(file: Path, rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows that an earlier call has written. Raises RequestError if the file is not of these rows."""
    if not file.exists():
        return []
    try:
        written: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        same = all(
            {**row, FIELD: None} == {**mine, FIELD: None} and len(row[FIELD]) == count
            for row, mine in zip(written, rows, strict=False)
        ) and len(written) <= len(rows)
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise RequestError(
            f"--out: {file} has other rows, or another number of alternates; choose another file, or remove it"
        )
    return written
