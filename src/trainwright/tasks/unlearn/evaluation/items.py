"""The rows of a benchmark as items: a prompt, the right answer and alternatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from trainwright.data.rows.formats import EXAMPLES, text_field, to_example
from trainwright.data.rows.layouts import columns_of
from trainwright.data.sources.reading import location_of, read_rows
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.recipe.sections.data import RowSettings
from trainwright.tasks.unlearn.benchmarks import Benchmark, EvaluationSet, Style

_LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Item:
    """One question, or one text to continue.

    Attributes:
        prompt: the question; empty if the whole text is the answer.
        answer: the right answer.
        paraphrase: the answer in other words, in the form of the wrong ones; None: there is none.
        wrong: wrong answers.
    """

    prompt: str
    answer: str
    paraphrase: str | None = None
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemSet:
    """The items of a set. ``before``: the start of every plain-text prompt."""

    source: str
    style: Style
    items: list[Item]
    before: str = ""

    def location(self, index: int) -> str:
        """Return file and line of an item, for messages."""
        return location_of(self.source, index)

    @property
    def has_wrong(self) -> bool:
        """Return whether every item has wrong answers."""
        return bool(self.items) and all(item.wrong for item in self.items)


def read_sets(benchmark: Benchmark, names: Iterable[str], limit: int | None, key: str) -> dict[str, ItemSet]:
    """Return the benchmark's sets that are in ``names``, with at most the first ``limit`` rows of each.

    Raises:
        RequestError: a source or a row is invalid, with the row's file and line.
    """
    chosen = [name for name in benchmark.sets if name in set(names)]
    return {name: read_set(benchmark.sets[name], limit, key) for name in chosen}


def read_set(evaluation_set: EvaluationSet, limit: int | None, key: str) -> ItemSet:
    """Return the items of one set. Raises like ``read_sets``."""
    source, style, before = evaluation_set.source, evaluation_set.style, evaluation_set.before
    table = read_rows(source, limit, key)
    rows = [{name: value for name, value in row.items() if value is not None} for row in table]
    build: Callable[[Row], Item] | None = _BUILDERS.get(style)
    if build is None:
        layout = EXAMPLES.layout(columns_of(rows[:8]), rows[:8], RowSettings(), f"{key}: {source}")
        style = "continue" if layout == "text" else "chat"
        build = functools.partial(_own, layout=layout)
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(build(row))
        except RequestError as error:
            raise RequestError(f"{key}: {location_of(source, number)}: {error}") from None
    if evaluation_set.examples is not None:
        shown = read_set(replace(evaluation_set, source=evaluation_set.examples, examples=None), None, key)
        before += "".join(f"Question: {item.prompt}\nAnswer: {item.answer}\n\n" for item in shown.items)
    return ItemSet(source, style, items, before)


def _question(row: Row) -> Item:
    """Return a row of TOFU: its wrong answers correspond to the paraphrase, if there is one, otherwise to the
    answer.
    """
    wrong = row.get("perturbed_answer", [])
    if isinstance(wrong, str):
        wrong = [wrong]
    if not isinstance(wrong, list) or not all(isinstance(each, str) and each.strip() for each in wrong):
        raise RequestError("the field perturbed_answer should be a list of texts")
    paraphrase = text_field(row, "paraphrased_answer") if "paraphrased_answer" in row else None
    return Item(text_field(row, "question"), text_field(row, "answer"), paraphrase, tuple(wrong))


def _passage(row: Row) -> Item:
    """Return a text to continue, or a complete one."""
    if "prompt" not in row and "gt" not in row:
        return Item("", text_field(row, "text"))
    prompt, truth = text_field(row, "prompt"), text_field(row, "gt")
    # Join the two as MUSE's authors do: with a space, unless one has white space at the seam.
    return Item(prompt, truth if prompt[-1].isspace() or truth[0].isspace() else f" {truth}")


def _choice(row: Row) -> Item:
    """Return a question with letters to choose from, in the format of WMDP and MMLU in lm-evaluation-harness."""
    question, choices, right = text_field(row, "question").strip(), row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
        raise RequestError(f"the field choices should be a list of 2 to {len(_LETTERS)} texts")
    if isinstance(right, str) and right.strip() in _LETTERS and right.strip():
        right = _LETTERS.index(right.strip())
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(choices):
        raise RequestError(f"the field answer should be the number of a choice, 0 to {len(choices) - 1}, or its letter")
    listed = "".join(f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False))
    letters = [f" {letter}" for letter in _LETTERS[: len(choices)]]
    return Item(f"{question}{listed}\nAnswer:", letters.pop(right), None, tuple(letters))


_BUILDERS = {"chat": _question, "few_shot": _question, "continue": _passage, "choices": _choice}


def _own(row: Row, layout: str) -> Item:
    """Return a text, or the single question and answer of a conversation."""
    if layout == "question_answer":
        return _question(row)
    example = to_example(row, layout)
    if isinstance(example, str):
        return Item("", example)
    turns = [message for message in example if message["role"] != "system"]
    if len(turns) != 2 or len(turns) != len(example):
        raise RequestError("each forget row must have one question and one answer; split longer conversations")
    return Item(str(turns[0]["content"]), str(turns[1]["content"]))
