"""The rows that a model is measured on, read once, then tokenized for each model; and a metric over all of them.

A ``Column`` has a value and a weight for each row, combined by their sums, with a confidence interval.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.chat_encoding import ChatEncoder, Encoded
from trainwright.data.rows.chat_templates import Remarks
from trainwright.data.rows.formats import EXAMPLES, Example, Message, NoTarget, TurnsError, to_example
from trainwright.data.rows.layouts import SINGLE, choose_layout, describe_unused_columns
from trainwright.data.rows.texts import TextEncoder
from trainwright.data.sources.reading import list_source_notes, locate_row, read_rows
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.data.tokens.token_rows import is_long_split, split_windows
from trainwright.errors import RequestError
from trainwright.inference.prompts import find_last_answer
from trainwright.recipe.sections.data import SourceSection
from trainwright.utils.installation import require
from trainwright.utils.text import format_clause

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BATCH = 256  # rows rendered and tokenized at a time
_SEED = 0


@dataclass(frozen=True)
class EvaluationRows:
    """Texts and conversations of one or several sources.

    Attributes:
        sources: where they come from.
        examples: the content of each row.
        numbers: the index of each row in its source, from 0.
        parts: the index of each row's source.
        notes: remarks for the user on how they were read.
    """

    sources: tuple[SourceSection, ...]
    examples: list[Example] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def name(self) -> str:
        """Return the names of all sources, for messages."""
        return " + ".join(source.source for source in self.sources)

    @property
    def conversations(self) -> list[int]:
        """Return the indices of the rows that ask something."""
        return [index for index, example in enumerate(self.examples) if not isinstance(example, str)]

    def chosen(self, indices: Sequence[int]) -> EvaluationRows:
        """Return some of the rows."""
        return EvaluationRows(
            self.sources,
            [self.examples[index] for index in indices],
            [self.numbers[index] for index in indices],
            [self.parts[index] for index in indices],
            self.notes,
        )

    def location(self, index: int) -> str:
        """Return file and line of a row, for messages."""
        source = self.sources[self.parts[index]]
        return locate_row(source.source, self.numbers[index], source.format == "documents")

    def build_question(self, index: int) -> list[Message]:
        """Return a conversation up to the start of its last answer."""
        turns = self._turns(index)
        return turns[: find_last_answer(turns)]

    def answer(self, index: int) -> Message:
        """Return the last answer of a conversation."""
        turns = self._turns(index)
        return turns[find_last_answer(turns)]

    def _turns(self, index: int) -> list[Message]:
        example = self.examples[index]
        assert not isinstance(example, str), "a text has no prompt"
        return example


def join_rows(several: Sequence[EvaluationRows]) -> EvaluationRows:
    """Return the rows of several sources, one after another."""
    parts: list[int] = []
    sources: tuple[SourceSection, ...] = ()
    for rows in several:
        parts += [part + len(sources) for part in rows.parts]
        sources += rows.sources
    examples = [example for rows in several for example in rows.examples]
    notes = list(dict.fromkeys(note for rows in several for note in rows.notes))
    return EvaluationRows(sources, examples, [number for rows in several for number in rows.numbers], parts, notes)


def read(source: SourceSection, *, key: str, only: Sequence[int] | None = None) -> EvaluationRows:
    """Read the rows of ``source``.

    Args:
        key: the name of the source in messages.
        only: the indices in the source of the rows to return, from 0; None: all.

    Raises:
        RequestError: the source, its layout or a row is invalid, or a row has no reference, with its file and line.
    """
    narrowing = functools.partial(EXAMPLES.narrowing, source.rows)
    table = read_rows(source.source, source.limit, key, source.format == "documents", narrowing)
    first = table[:8]
    rows_of_first = [dict(zip(first, values, strict=True)) for values in zip(*first.values(), strict=True)]
    try:
        layout = choose_layout(table.column_names, rows_of_first, source.rows, SINGLE)
    except RequestError as error:
        raise RequestError(f"{key}: {source.source}: {error}") from None
    numbers = list(range(len(table)) if only is None else only)
    rows = EvaluationRows((source,), numbers=numbers, parts=[0] * len(numbers))
    remarks: Counter[str] = Counter()
    for index, row in enumerate(table if only is None else table.select(numbers)):
        try:
            rows.examples.append(to_example(row, layout, remarks))
        except NoTarget as error:
            raise RequestError(
                f"{key}: {rows.location(index)}: {error}, so there is no reference to compare with; fill it in or "
                "remove the row"
            ) from None
        except RequestError as error:
            raise RequestError(f"{key}: {rows.location(index)}: {error}") from None
    rows.notes.extend(list_source_notes(source.source, key, source.format == "documents"))
    if layout.read_as:
        rows.notes.append(f"{source.source}: {layout.read_as}")
    if unused := layout.unused(table.column_names):
        rows.notes.append(f"{source.source}: {describe_unused_columns(unused)}")
    rows.notes.extend(f"{source.source}: {format_clause(count, 'row', remark)}" for remark, count in remarks.items())
    return rows


def draw_indices(total: int, count: int | None) -> list[int]:
    """Return ``count`` of ``total`` indices, in order and the same for every call; all of them if it is None."""
    if count is None or count >= total:
        return list(range(total))
    return sorted(np.random.default_rng(_SEED).choice(total, count, replace=False).tolist())


@dataclass(frozen=True)
class RowPrompts:
    """The prompts for a model, with one entry for each question.

    Attributes:
        rows: the indices of the rows that are asked.
        tokens: each ends where the answer is to begin.
        references: the answers of the rows.
    """

    rows: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EncodedRows:
    """Rows in the tokens of one model.

    Attributes:
        dataset: every row, and which of its tokens are targets; a split row gives several windows.
        windows: the number of windows of each row.
        last_turn: for each row, the number of targets of its last answer.
        cut: the number of rows that were truncated, because the model or the user limits their length.
        split: the number of rows that were split without loss.
        notes: remarks for the user on the template.
    """

    dataset: TokenDataset
    windows: list[int]
    last_turn: list[int]
    prompts: RowPrompts
    cut: int
    split: int
    notes: list[str]

    def save(self, directory: Path) -> None:
        """Write everything to ``directory``, for other processes."""
        self.dataset.save(directory / "tokens")
        rest = {member.name: getattr(self, member.name) for member in fields(self) if member.name != "dataset"}
        (directory / "rows.json").write_text(json.dumps({**rest, "prompts": asdict(self.prompts)}), encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> EncodedRows:
        """Read what ``save`` wrote."""
        rest = json.loads((directory / "rows.json").read_text(encoding="utf-8"))
        prompts = RowPrompts(**rest.pop("prompts"))
        return cls(TokenDataset.open(directory / "tokens"), prompts=prompts, **rest)


def encode(
    rows: EvaluationRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    long_documents: str,
    questions: Sequence[int],
    key: str,
) -> EncodedRows:
    """Tokenize the rows.

    Args:
        max_length: of a row; longer ones are split or truncated, like ``data.long_documents`` of a recipe.
        questions: indices of the rows to answer, which are conversations.

    Raises:
        RequestError: the template rejects a row, or nothing of its answer remains after truncation; with file and line.
    """
    encoder = ChatEncoder(tokenizer) if rows.conversations else None
    pairs: list[Encoded] = []
    windows, last_turn, call_texts, cut, split = [], [], {}, 0, 0
    remarks = Remarks()
    for row, (ids, flags) in enumerate(_encode_rows(rows, tokenizer, encoder, key, remarks)):
        is_text = isinstance(rows.examples[row], str)
        ends = [(0, len(ids))]
        if max_length is not None and len(ids) > max_length:
            splits = is_long_split(long_documents, "text" if is_text else "messages")
            ends = split_windows(len(ids), max_length) if splits else [(0, max_length)]
            split, cut = split + splits, cut + (not splits)
        trained_turns = [(begin, end) for begin, end in ends if any(flags[begin + 1 : end])]
        if not trained_turns:
            raise RequestError(
                f"{key}: {rows.location(row)}: its {len(ids):,} tokens have no answer within the first {ends[0][1]:,}; "
                "raise --max-length up to the model's limit, or remove the row"
            )
        begin = max(1, find_last_run(flags)[0])
        last_turn.append(sum(flags[begin : trained_turns[-1][1]]))
        windows.append(len(trained_turns))
        pairs += [(ids[begin:end], flags[begin:end]) for begin, end in trained_turns]
        if not is_text and rows.answer(row).get("tool_calls"):
            call_texts[row] = str(tokenizer.decode(ids[begin : begin + sum(flags[begin:])], skip_special_tokens=True))
    dataset = TokenDataset.from_examples(pairs, fingerprint(pairs))
    prompts = RowPrompts() if encoder is None else _encode_questions(rows, encoder, questions, call_texts, key)
    notes = [*rows.notes, *([] if encoder is None else encoder.notes), *remarks.lines()]
    return EncodedRows(dataset, windows, last_turn, prompts, cut, split, notes)


def fingerprint(pairs: Sequence[Encoded]) -> str:
    """Return a fingerprint of tokens and targets."""
    digest = hashlib.sha256()
    for ids, flags in pairs:
        digest.update(np.asarray(ids, dtype="<i4").tobytes() + np.asarray(flags, dtype=np.bool_).tobytes() + b"|")
    return digest.hexdigest()[:32]


def _encode_rows(
    rows: EvaluationRows, tokenizer: PreTrainedTokenizerBase, encoder: ChatEncoder | None, key: str, remarks: Remarks
) -> Iterator[Encoded]:
    start = 0
    texts: TextEncoder | None = None
    for is_text, alike in groupby(rows.examples, lambda example: isinstance(example, str)):
        while batch := list(islice(alike, _BATCH)):
            changes: list[set[str]] = [set() for _ in batch]
            try:
                if is_text or encoder is None:
                    texts = texts or TextEncoder(tokenizer)
                    yield from texts.encode([example for example in batch if isinstance(example, str)], changes)
                else:
                    yield from encoder.encode([example for example in batch if not isinstance(example, str)], changes)
            except TurnsError as error:
                raise RequestError(f"{key}: {rows.location(start + error.index)}: {error}") from None
            for number, change in enumerate(changes, start):
                remarks.add(change, functools.partial(rows.location, number))
            start += len(batch)


def _encode_questions(
    rows: EvaluationRows, encoder: ChatEncoder, questions: Sequence[int], called: Mapping[int, str], key: str
) -> RowPrompts:
    """Return the questions of the rows ``questions``; ``called`` has the references of answers that call tools."""
    references = [called.get(row, str(rows.answer(row)["content"])).strip() for row in questions]
    try:
        return RowPrompts(list(questions), encoder.prompts([rows.build_question(row) for row in questions]), references)
    except TurnsError as error:
        raise RequestError(f"{key}: {rows.location(questions[error.index])}: {error}") from None


def find_last_run(flags: Sequence[bool] | np.ndarray) -> tuple[int, int]:
    """Return the start and the end of the last contiguous run of targets."""
    indices = np.flatnonzero(flags)
    breaks = np.flatnonzero(np.diff(indices) > 1)
    return int(indices[breaks[-1] + 1] if len(breaks) else indices[0]), int(indices[-1]) + 1


CONFIDENCE = 0.95
RESAMPLES = 2000
_Z = 1.959963984540054  # of the normal distribution, for CONFIDENCE
_NUMBERS_AT_ONCE = 4_000_000


def _identity(mean: Any) -> Any:
    return mean


@dataclass(frozen=True)
class Column:
    """``finish(sum of values / sum of weights)`` is the metric: a mean over tokens, or with weights of 1 over rows."""

    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    finish: Callable[[Any], Any] = _identity

    @classmethod
    def of_rows(cls, scores: Sequence[float]) -> Column:
        """Return a column in which every row has the same weight."""
        return cls(np.array(scores, dtype=np.float64), np.ones(len(scores)))

    def __len__(self) -> int:
        return len(self.values)

    def chosen(self, rows: Sequence[int]) -> Column:
        """Return the column of some of the rows."""
        return Column(self.values[list(rows)], self.weights[list(rows)], self.finish)

    @property
    def is_proportion(self) -> bool:
        """Whether the metric is the share of rows, or of their parts, that are right: every row entirely or not at all.

        A row's score of 0 or 1 is right or wrong; a score between them makes the metric a mean.
        """
        wrong, right = self.values == 0, self.values == self.weights
        return self.finish is _identity and bool((wrong | right).all())

    @property
    def effective_rows(self) -> float:
        """The number of rows of equal weight that would tell as much (Kish 1965)."""
        return float(self.weights.sum() ** 2 / (self.weights**2).sum())

    def value(self) -> float:
        """Return the metric over all rows."""
        return float(self.finish(self.values.sum() / self.weights.sum()))

    def row(self, index: int) -> float | None:
        """Return the metric of one row alone; None if it has no weight."""
        weight = self.weights[index]
        return float(self.finish(self.values[index] / weight)) if weight else None


@dataclass(frozen=True)
class Estimate:
    """A metric with its interval, over ``n`` rows. There is no interval of a single row."""

    value: float
    low: float | None
    high: float | None
    n: int


def estimate(column: Column, resamples: int = RESAMPLES) -> Estimate:
    """Return the metric with its 95 % interval: of a proportion by Wilson's method, else the percentile interval
    (Efron and Tibshirani 1993, chapter 13), which would be a single point where all rows have the same value.
    """
    if len(column) > 1 and column.is_proportion:
        return Estimate(column.value(), *compute_wilson_interval(column.value(), column.effective_rows), len(column))

    def metric(values: Any, weights: Any, axis: int) -> Any:
        return column.finish(values.sum(axis) / weights.sum(axis))

    return Estimate(column.value(), *_bootstrap_interval(metric, [column], resamples), len(column))


def estimate_difference(one: Column, other: Column) -> Estimate:
    """Return ``one`` minus ``other`` on the same rows, with its interval: both are resampled with the same rows."""
    assert len(one) == len(other), "rows are compared one by one"
    if len(one) > 1 and one.is_proportion and other.is_proportion:
        return Estimate(one.value() - other.value(), *_compute_paired_interval(one, other), len(one))

    def metric(values: Any, weights: Any, others: Any, other_weights: Any, axis: int) -> Any:
        first = one.finish(values.sum(axis) / weights.sum(axis))
        return first - other.finish(others.sum(axis) / other_weights.sum(axis))

    return Estimate(one.value() - other.value(), *_bootstrap_interval(metric, [one, other], RESAMPLES), len(one))


def compute_wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a proportion of ``count`` rows (Wilson 1927)."""
    spread = _Z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    # Rounding must not move the end of an interval away from 0 and 1.
    return (0.0 if share == 0 else max(0.0, middle - half)), (1.0 if share == 1 else min(1.0, middle + half))


def _compute_paired_interval(one: Column, other: Column) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two proportions of the same rows (Newcombe 1998, method 10)."""
    share, other_share = one.value(), other.value()
    low, high = compute_wilson_interval(share, one.effective_rows)
    other_low, other_high = compute_wilson_interval(other_share, other.effective_rows)
    both = float((one.values * other.values).sum() / (one.weights * other.weights).sum())
    spread = math.sqrt(share * (1 - share) * other_share * (1 - other_share))
    correlation = 0.0 if spread == 0 else (both - share * other_share) / spread
    down, up, other_down, other_up = share - low, high - share, other_share - other_low, other_high - other_share
    below = math.sqrt(max(0.0, down**2 - 2 * correlation * down * other_up + other_up**2))
    above = math.sqrt(max(0.0, up**2 - 2 * correlation * up * other_down + other_down**2))
    return share - other_share - below, share - other_share + above


def _bootstrap_interval(metric: Any, columns: list[Column], resamples: int) -> tuple[float | None, float | None]:
    count = len(columns[0])
    if count < 2:
        return None, None
    require("scipy", "a confidence interval")
    from scipy.stats import bootstrap

    result = bootstrap(
        tuple(array for column in columns for array in (column.values, column.weights)),
        metric,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=resamples,
        confidence_level=CONFIDENCE,
        batch=max(1, _NUMBERS_AT_ONCE // (count * len(columns) * 2)),
        rng=np.random.default_rng(_SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
