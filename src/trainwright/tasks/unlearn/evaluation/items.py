"""The rows of a benchmark as items: a prompt, the right answer and alternatives.

The items of all sets in the tokens of one model: sequences to score, and prompts to answer.

The sequences of all sets form one list, so that batches are full and ranks busy.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainwright.data.rows.chat_encoding import ChatEncoder, Encoded
from trainwright.data.rows.formats import EXAMPLES, TurnsError, read_text_field, to_example
from trainwright.data.rows.layouts import list_columns
from trainwright.data.rows.texts import encode_texts
from trainwright.data.rows.tokenizer_calls import call_tokenizer
from trainwright.data.sources.reading import locate_row, read_rows
from trainwright.data.sources.row_files import Row
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.inference.evaluation.rows import fingerprint
from trainwright.recipe.sections.data import RowSettings
from trainwright.tasks.unlearn.benchmarks import Benchmark, EvaluationSet, Style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        return locate_row(self.source, index)

    @property
    def has_wrong(self) -> bool:
        """Return whether every item has wrong answers."""
        return bool(self.items) and all(item.wrong for item in self.items)


def read_sets(benchmark: Benchmark, names: Iterable[str], limit: int | None, key: str) -> dict[str, ItemSet]:
    """Return the benchmark's sets that are in ``names``, with at most the first ``limit`` rows of each.

    Raises:
        RequestError: a source or a row is invalid, with the row's file and line.
    """
    set_names = [name for name in benchmark.sets if name in set(names)]
    return {name: read_set(benchmark.sets[name], limit, key) for name in set_names}


def read_set(evaluation_set: EvaluationSet, limit: int | None, key: str) -> ItemSet:
    """Return the items of one set. Raises like ``read_sets``."""
    source, style, before = evaluation_set.source, evaluation_set.style, evaluation_set.before
    table = read_rows(source, limit, key)
    rows = [{name: value for name, value in row.items() if value is not None} for row in table]
    build: Callable[[Row], Item] | None = _BUILDERS.get(style)
    if build is None:
        layout = EXAMPLES.layout(list_columns(rows[:8]), rows[:8], RowSettings(), f"{key}: {source}")
        style = "continue" if layout == "text" else "chat"
        build = functools.partial(_own, layout=layout)
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(build(row))
        except RequestError as error:
            raise RequestError(f"{key}: {locate_row(source, number)}: {error}") from None
    if evaluation_set.examples is not None:
        examples = read_set(replace(evaluation_set, source=evaluation_set.examples, examples=None), None, key)
        before += "".join(f"Question: {item.prompt}\nAnswer: {item.answer}\n\n" for item in examples.items)
    return ItemSet(source, style, items, before)


def _parse_question(row: Row) -> Item:
    """Return a row of TOFU: its wrong answers correspond to the paraphrase, if it has one, or to the answer."""
    wrong = row.get("perturbed_answer", [])
    if isinstance(wrong, str):
        wrong = [wrong]
    if not isinstance(wrong, list) or not all(isinstance(text, str) and text.strip() for text in wrong):
        raise RequestError("the field perturbed_answer should be a list of texts")
    paraphrase = read_text_field(row, "paraphrased_answer") if "paraphrased_answer" in row else None
    return Item(read_text_field(row, "question"), read_text_field(row, "answer"), paraphrase, tuple(wrong))


def _parse_passage(row: Row) -> Item:
    """Return a text to continue, or a complete one."""
    if "prompt" not in row and "gt" not in row:
        return Item("", read_text_field(row, "text"))
    prompt, truth = read_text_field(row, "prompt"), read_text_field(row, "gt")
    # Join the two as MUSE's authors do: with a space, unless one has white space at the seam.
    return Item(prompt, truth if prompt[-1].isspace() or truth[0].isspace() else f" {truth}")


def _parse_choice(row: Row) -> Item:
    """Return a question with letters to choose from, in the format of WMDP and MMLU in lm-evaluation-harness."""
    question, choices, right = read_text_field(row, "question").strip(), row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
        raise RequestError(f"the field choices should be a list of 2 to {len(_LETTERS)} texts")
    if isinstance(right, str) and right.strip() in _LETTERS and right.strip():
        right = _LETTERS.index(right.strip())
    if not isinstance(right, int) or isinstance(right, bool) or not 0 <= right < len(choices):
        raise RequestError(f"the field answer should be the number of a choice, 0 to {len(choices) - 1}, or its letter")
    choice_lines = "".join(f"\n{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False))
    letters = [f" {letter}" for letter in _LETTERS[: len(choices)]]
    return Item(f"{question}{choice_lines}\nAnswer:", letters.pop(right), None, tuple(letters))


_BUILDERS = {"chat": _parse_question, "few_shot": _parse_question, "continue": _parse_passage, "choices": _parse_choice}


def _own(row: Row, layout: str) -> Item:
    """Return a text, or the single question and answer of a conversation."""
    if layout == "question_answer":
        return _parse_question(row)
    example = to_example(row, layout)
    if isinstance(example, str):
        return Item("", example)
    turns = [message for message in example if message["role"] != "system"]
    if len(turns) != 2 or len(turns) != len(example):
        raise RequestError("each forget row must have one question and one answer; split longer conversations")
    return Item(str(turns[0]["content"]), str(turns[1]["content"]))


T = TypeVar("T")

ANSWER, PARAPHRASE, WRONG = "answer", "paraphrase", "wrong"
# The length of an answer and its stop texts, by style, as used by MUSE's authors; for chats the user sets the length.
NEW_TOKENS = {"few_shot": 32, "continue": 128}
STOP_TEXTS = {"few_shot": ("\n\n", "\nQuestion", "Question:")}


@dataclass(frozen=True)
class ItemSequences:
    """The sequences to score.

    Attributes:
        dataset: every sequence once.
        places: from set, item number, kind (answer, paraphrase, wrong) and index to the number of the sequence.
        text_targets: for each sequence, how many of its first targets are text and not the stop after it.
    """

    dataset: TokenDataset
    places: dict[tuple[str, int, str, int], int]
    text_targets: list[int]

    def save(self, directory: Path) -> None:
        """Write everything to ``directory``, for other processes."""
        self.dataset.save(directory / "tokens")
        entries = [[*key, number] for key, number in self.places.items()]
        about = {"places": entries, "text_targets": self.text_targets}
        (directory / "sequences.json").write_text(json.dumps(about), encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> ItemSequences:
        """Read what ``save`` wrote."""
        about = json.loads((directory / "sequences.json").read_text(encoding="utf-8"))
        sequence_numbers = {(name, item, kind, which): number for name, item, kind, which, number in about["places"]}
        return cls(TokenDataset.open(directory / "tokens"), sequence_numbers, about["text_targets"])

    def select_set(self, name: str) -> list[int]:
        """Return the sequences of the answers of a set, in the order of its items."""
        pairs = [
            (item, number) for (part, item, kind, _), number in self.places.items() if (part, kind) == (name, ANSWER)
        ]
        return [number for _, number in sorted(pairs)]


@dataclass(frozen=True)
class ItemPrompts:
    """The prompts of one set, with the right answers for comparison."""

    tokens: list[list[int]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


class ItemEncoder:
    """Convert items to tokens of ``tokenizer``; anything longer than ``max_length`` is truncated.

    Raises:
        RequestError: the tokenizer is not a fast one; in any method: a template rejects an item, or leaves no space for
            an answer, with file and line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None, key: str) -> None:
        if not tokenizer.is_fast:
            raise RequestError(f"{key}: the tokenizer has no character offsets; use one with tokenizer.json")
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._key = key
        self._chat: ChatEncoder | None = None
        self.cut = 0

    @property
    def notes(self) -> list[str]:
        """Return remarks for the user on the template."""
        return [] if self._chat is None else self._chat.notes

    def sequences(self, sets: Mapping[str, ItemSet], kinds: Sequence[str]) -> ItemSequences:
        """Return every item's answer and, of ``kinds``, paraphrase and wrong answers, for sets that have them."""
        pairs: list[Encoded] = []
        sequence_numbers: dict[tuple[str, int, str, int], int] = {}
        for name, item_set in sets.items():
            texts = [
                (number, kind, which, text)
                for number, item in enumerate(item_set.items)
                for kind, which, text in _iterate_texts(item)
                if kind == ANSWER or (kind in kinds and item_set.has_wrong)
            ]
            for (number, kind, which, _), pair in zip(texts, self._encoded(item_set, texts), strict=True):
                sequence_numbers[name, number, kind, which] = len(pairs)
                pairs.append(self._within(pair, item_set, number))
        stops = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        text = [_count_text_targets(ids, flags, stops) for ids, flags in pairs]
        return ItemSequences(TokenDataset.from_examples(pairs, fingerprint(pairs)), sequence_numbers, text)

    def prompts(self, each: ItemSet, positions: int | None) -> ItemPrompts:
        """Return the prompts and reference answers of all items. They must leave space for an answer in a model with
        ``positions``.
        """
        if each.style == "chat":
            turns = [[{"role": "user", "content": item.prompt}] for item in each.items]
            tokens = self._call_encoder(each, lambda encoder: encoder.prompts(turns))
            references = [item.answer.strip() for item in each.items]
        else:
            texts = [_format_opening(each, item) for item in each.items]
            tokens = encode_texts(self._tokenizer, texts)
            references = self._references(each)
        for number, prompt in enumerate(tokens):
            if positions is not None and len(prompt) >= positions:
                raise RequestError(
                    f"{self._key}: {each.location(number)}: its prompt has {len(prompt):,} tokens, but the model has "
                    f"only {positions:,} positions; shorten or remove the row"
                )
        return ItemPrompts(tokens, references)

    def _references(self, each: ItemSet) -> list[str]:
        """Return the answers, truncated to the longest possible answer."""
        answers = [item.answer for item in each.items]
        if each.style == "continue":
            answer_ids = call_tokenizer(self._tokenizer, answers, add_special_tokens=False, verbose=False)["input_ids"]
            answers = [str(self._tokenizer.decode(ids[: NEW_TOKENS["continue"]])) for ids in answer_ids]
        return [answer.strip() for answer in answers]

    def _encoded(self, each: ItemSet, numbered_texts: Sequence[tuple[int, str, int, str]]) -> Iterator[Encoded]:
        if each.style == "chat":
            conversations = [
                [{"role": "user", "content": each.items[number].prompt}, {"role": "assistant", "content": text}]
                for number, _, _, text in numbered_texts
            ]
            numbers = [number for number, *_ in numbered_texts]
            yield from self._call_encoder(each, lambda encoder: encoder.encode(conversations), numbers)
            return
        openings = [_format_opening(each, each.items[number]) for number, *_ in numbered_texts]
        space = " " if each.style == "few_shot" else ""
        texts = [f"{opening}{space}{text}" for opening, (*_, text) in zip(openings, numbered_texts, strict=True)]
        encoding = call_tokenizer(self._tokenizer, texts, return_offsets_mapping=True, verbose=False)
        for opening, ids, offsets in zip(openings, encoding["input_ids"], encoding["offset_mapping"], strict=True):
            # The tokens that end after the opening are targets.
            yield list(ids), [end > len(opening) for _, end in offsets]

    def _within(self, pair: Encoded, each: ItemSet, number: int) -> Encoded:
        ids, flags = pair
        within = flags[: self._max_length]
        if not any(within[1:]):
            raise RequestError(
                f"{self._key}: {each.location(number)}: its {len(ids):,} tokens have no answer within the first "
                f"{len(within):,}; raise --max-length up to the model's limit, or remove the row"
            )
        self.cut += len(within) < len(flags)
        return ids[: self._max_length], within

    def _call_encoder(
        self, each: ItemSet, work: Callable[[ChatEncoder], list[T]], numbers: Sequence[int] | None = None
    ) -> list[T]:
        self._chat = self._chat or ChatEncoder(self._tokenizer)
        try:
            return work(self._chat)
        except TurnsError as error:
            number = error.index if numbers is None else numbers[error.index]
            raise RequestError(f"{self._key}: {each.location(number)}: {error}") from None


def _iterate_texts(item: Item) -> Iterator[tuple[str, int, str]]:
    """Yield every possible answer to an item: its kind, its index among that kind, and the text."""
    yield ANSWER, 0, item.answer
    if item.paraphrase is not None:
        yield PARAPHRASE, 0, item.paraphrase
    for which, wrong in enumerate(item.wrong):
        yield WRONG, which, wrong


def _format_opening(each: ItemSet, item: Item) -> str:
    """Return the text before the answer, in plain text."""
    question = f"Question: {item.prompt}\nAnswer:" if each.style == "few_shot" else item.prompt
    return each.before + question


def _count_text_targets(ids: Sequence[int], flags: Sequence[bool], stops: set[int]) -> int:
    """Return the number of targets up to the last one that is text; all if none is."""
    targets = [token for token, flag in zip(ids[1:], flags[1:], strict=True) if flag]
    count = len(targets)
    while count and targets[count - 1] in stops:
        count -= 1
    return count or len(targets)
