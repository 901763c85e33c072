"""Measure one model on the rows, by all ranks together, store the results, and compare those of two models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.data.rows.pairs import CHOSEN
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.task import Measured
from trainwright.errors import RequestError
from trainwright.inference.answering import AnswerSettings, Stage, answer_all
from trainwright.inference.evaluation.metrics import LIKELIHOODS, AnswerMatch, Judge, build_judges
from trainwright.inference.evaluation.rows import (
    Column,
    EncodedRows,
    Estimate,
    compute_wilson_interval,
    draw_indices,
    estimate_difference,
    find_last_run,
)
from trainwright.inference.generation import Answer, Sampling, Stop, stop_of
from trainwright.inference.loading import Loaded
from trainwright.inference.scoring import TokenScores, score
from trainwright.parallel.world import World
from trainwright.recipe.schema import EvaluateSection
from trainwright.utils import heartbeat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Floats = npt.NDArray[np.float64]
# Applied to the mean of a column.
FINISH = {"perplexity": np.exp}


@dataclass(frozen=True)
class Origins:
    """The origin of the rows: names of the sources, and each row's index in its source, from 0, and its source's."""

    sources: list[str]
    numbers: list[int]
    parts: list[int]


@dataclass(frozen=True)
class Sample:
    """One row: the prompt, the reference and the answer, with the scores of this row."""

    row: int  # in the source, from 1
    scores: dict[str, float | None]
    prompt: str | None = None
    reference: str | None = None
    answer: str | None = None
    complete: bool | None = None  # whether the model stopped by itself
    source: str | None = None  # if there are several


@dataclass(frozen=True)
class Measurement:
    """A model's columns over the rows, by metric.

    Attributes:
        origin: a description of the model.
        tokens: a fingerprint of the rows in the model's tokens; if two models differ in it, their likelihoods are not
            comparable.
        origins: where the rows come from.
        answered: the indices of the rows that were answered.
        notes: remarks for the reader of the numbers.
    """

    origin: str
    tokens: str
    columns: dict[str, Column]
    samples: list[Sample]
    origins: Origins
    answered: list[int]
    notes: list[str] = field(default_factory=list)

    def select_source(self, part: int) -> Measurement:
        """Return the results for the rows of one source."""
        rows = [row for row, source in enumerate(self.origins.parts) if source == part]
        questions = [index for index, row in enumerate(self.answered) if self.origins.parts[row] == part]
        columns = {
            name: column.chosen(rows if name in LIKELIHOODS else questions) for name, column in self.columns.items()
        }
        return replace(self, columns={name: column for name, column in columns.items() if len(column)}, notes=[])

    def save(self, file: Path) -> None:
        """Write the object to a file or directory."""
        columns = {
            name: {"values": column.values.tolist(), "weights": column.weights.tolist()}
            for name, column in self.columns.items()
        }
        file.write_text(json.dumps({**asdict(self), "columns": columns}), encoding="utf-8")

    @classmethod
    def open(cls, file: Path) -> Measurement:
        """Read what ``save`` wrote."""
        content = json.loads(file.read_text(encoding="utf-8"))
        columns = {
            name: Column(np.array(column["values"]), np.array(column["weights"]), *_finish(name))
            for name, column in content.pop("columns").items()
        }
        samples = [Sample(**sample) for sample in content.pop("samples")]
        origins = Origins(**content.pop("origins"))
        return cls(**content, columns=columns, samples=samples, origins=origins)


@dataclass(frozen=True)
class MeasurementSettings:
    """What is measured of one model.

    Attributes:
        model: describes the model.
        origins: where the rows come from.
        names: of the metrics.
        judges: those of the metrics that judge answers.
        sampling: how rows are answered.
        batch: the number of rows answered at once.
    """

    model: str
    origins: Origins
    names: Sequence[str]
    judges: Mapping[str, Judge]
    sampling: Sampling
    batch: int | None


def measure(
    loaded: Loaded, rows: EncodedRows, settings: MeasurementSettings, world: World, stage: Stage
) -> Measurement | None:
    """Score the rows and generate the answers asked for. Every rank must call; rank 0 gets the full result."""
    scores: list[TokenScores] = []
    answers: list[Answer] = []
    needs_scores = any(name in LIKELIHOODS for name in settings.names)
    if needs_scores:
        scoring_progress = stage(f"scoring with {settings.model}", len(rows.dataset))
        scores = _join_windows(score(loaded.lm, rows.dataset, world, done=scoring_progress), rows.windows)
    if settings.judges:
        stop = stop_of(loaded.lm.model, loaded.tokenizer, chat=True)
        answer_settings = AnswerSettings(settings.sampling, stop, settings.batch)
        answer_progress = stage(f"answers of {settings.model}", len(rows.prompts.rows))
        with loaded.lm.open_for_generation() as model:
            answers = answer_all(model, loaded.tokenizer, rows.prompts.tokens, answer_settings, world, answer_progress)
    if not world.is_main:
        return None
    columns = build_likelihood_columns(settings.names, scores, rows.last_turn) if needs_scores else {}
    for name, judge in settings.judges.items():
        pairs = zip(rows.prompts.references, answers, strict=True)
        columns[name] = Column.of_rows([judge(reference, answer.text.strip()) for reference, answer in pairs])
    by_metric = {name: columns[name] for name in settings.names}
    samples = _build_samples(loaded, rows, settings.origins, by_metric, answers)
    answered_rows = rows.prompts.rows if settings.judges else []
    return Measurement(settings.model, rows.dataset.fingerprint, by_metric, samples, settings.origins, answered_rows)


def _join_windows(scores: Sequence[TokenScores], windows: Sequence[int]) -> list[TokenScores]:
    """Return the scores of every row, joined from its windows."""
    remaining = iter(scores)
    return [
        TokenScores(np.concatenate([part.losses for part in parts]), np.concatenate([part.correct for part in parts]))
        for parts in (list(islice(remaining, count)) for count in windows)
    ]


def _build_samples(
    loaded: Loaded, rows: EncodedRows, origins: Origins, columns: Mapping[str, Column], answers: list[Answer]
) -> list[Sample]:
    questions = {row: question for question, row in enumerate(rows.prompts.rows)} if answers else {}
    samples = []
    for row, (number, part) in enumerate(zip(origins.numbers, origins.parts, strict=True)):
        question = questions.get(row)
        scores = {
            name: column.row(row if question is None or name in LIKELIHOODS else question)
            for name, column in columns.items()
            if name in LIKELIHOODS or question is not None
        }
        extra: dict[str, Any] = {"source": origins.sources[part]} if len(origins.sources) > 1 else {}
        if question is not None:
            answer = answers[question]
            prompt = str(loaded.tokenizer.decode(rows.prompts.tokens[question]))
            extra |= {"prompt": prompt, "reference": rows.prompts.references[question]}
            extra |= {"answer": answer.text.strip(), "complete": answer.complete}
        samples.append(Sample(number + 1, scores, **extra))
    return samples


def _finish(name: str) -> list[Any]:
    return [FINISH[name]] if name in FINISH else []


def build_likelihood_columns(
    names: Sequence[str], rows: Sequence[TokenScores], last_turn: Sequence[int]
) -> dict[str, Column]:
    """Return the columns of ``names`` over scored rows.

    Args:
        last_turn: for each row, how many of its last targets belong to its last answer.
    """
    losses = [row.losses.astype(np.float64) for row in rows]
    targets = np.array([len(row) for row in losses], dtype=np.float64)
    totals = np.array([row.sum() for row in losses])
    probabilities = [answer_probability(row, count) for row, count in zip(losses, last_turn, strict=True)]
    columns = {
        "loss": Column(totals, targets),
        "perplexity": Column(totals, targets, FINISH["perplexity"]),
        "token_accuracy": Column(np.array([float(row.correct.sum()) for row in rows]), targets),
        "answer_probability": Column(np.array(probabilities), np.array([float(count > 0) for count in last_turn])),
    }
    return {name: columns[name] for name in names if name in columns}


def answer_probability(losses: Floats, count: int) -> float:
    """Return the geometric mean of the probabilities of the last ``count`` targets, P(answer | question)^(1 / tokens),
    as in TOFU (arXiv 2401.06121); 0 if there are none.
    """
    return float(np.exp(-losses[len(losses) - count :].mean())) if count else 0.0


@dataclass(frozen=True)
class MetricDifferences:
    """The differences, first minus second, by metric."""

    differences: dict[str, Estimate]
    notes: list[str] = field(default_factory=list)


def compare(one: Measurement, other: Measurement) -> MetricDifferences:
    """Return the paired differences of all comparable metrics. Both must be measured on the same rows."""
    names = [name for name in one.columns if name in other.columns]
    notes = []
    if one.tokens != other.tokens and any(name in LIKELIHOODS for name in names):
        notes.append(
            "the two models have different tokenizers, chat templates or lengths, so their likelihoods cannot be "
            "compared"
        )
        names = [name for name in names if name not in LIKELIHOODS]
    return MetricDifferences(
        {name: estimate_difference(one.columns[name], other.columns[name]) for name in names}, notes
    )


class ValidationQuestions:
    """Validation rows to answer, each up to its last answer, which is the reference.

    Rows with a truncated answer are not used. The prompts have exactly the tokens that training sees.

    Raises:
        RequestError: no row can be used, or a setting of a metric is invalid.
        MachineError: a library that a metric needs is not installed.
    """

    def __init__(
        self, section: EvaluateSection, validation: TokenDataset, longest: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = Sampling(max_new_tokens=section.max_new_tokens)
        self._judges = build_judges(section.metrics, section.answer_pattern, section.json_schema)
        answers = [n for n in range(validation.sequence_count) if validation.role(n) == CHOSEN]  # without rejected ones
        uncut = [n for n in answers if validation.sequence_length(n) < longest]
        spans = {n: find_last_run(validation.sequence(n)[1]) for n in uncut}
        with_question = [n for n in uncut if spans[n][0] > 0]
        if not with_question:
            raise RequestError(
                "evaluate.metrics: no validation row has a prompt and a full answer within data.max_length"
            )
        indices = draw_indices(len(with_question), section.generation_limit)
        self._rows = [with_question[index] for index in indices]
        self._prompts: list[list[int]] = []
        self._references: list[str] = []
        for number in self._rows:
            tokens = validation.sequence(number)[0].tolist()
            begin, end = spans[number]
            self._prompts.append(tokens[:begin])
            self._references.append(str(tokenizer.decode(tokens[begin:end], skip_special_tokens=True)).strip())
        self._check_references()

    def metrics(self, model: PreTrainedModel, stop: Stop, world: World, *, together: bool) -> Measured:
        """Return the mean of every metric over the rows, the same on every rank, with the answers on the first one.
        Every rank must call.

        Args:
            model: the full model, ready for generation.
            together: whether every rank answers everything, because a pass of the model involves all ranks.
        """
        prompts, settings = self._prompts, AnswerSettings(self._sampling, stop, together=together)
        answers = answer_all(model, self._tokenizer, prompts, settings, world)
        texts = [answer.text.strip() for answer in answers]
        columns = {
            name: Column.of_rows(list(self._iterate_scores(judge, texts))) for name, judge in self._judges.items()
        }
        samples = [
            asdict(
                Sample(
                    self._rows[number] + 1,
                    {name: column.row(number) for name, column in columns.items()},
                    prompt=str(self._tokenizer.decode(prompts[number])),
                    reference=self._references[number],
                    answer=texts[number],
                    complete=answer.complete,
                )
            )
            for number, answer in enumerate(answers)
            if world.is_main
        ]
        return Measured(
            {name: column.value() for name, column in columns.items()},
            {
                name: compute_wilson_interval(c.value(), c.effective_rows)
                for name, c in columns.items()
                if c.is_proportion
            },
            samples,
            sum(not answer.complete for answer in answers),
            self._sampling.max_new_tokens,
        )

    def _iterate_scores(self, judge: Judge, texts: Sequence[str]) -> Iterator[float]:
        for reference, text in zip(self._references, texts, strict=True):
            yield judge(reference, text)
            heartbeat.note_progress()

    def _check_references(self) -> None:
        match = self._judges.get("answer")
        if not isinstance(match, AnswerMatch):
            return
        for reference in self._references:
            try:
                match.check(reference)
            except RequestError as error:
                raise RequestError(f"evaluate.answer_pattern: of a validation row {error}") from None
