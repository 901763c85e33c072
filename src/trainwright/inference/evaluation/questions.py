"""Answers to validation rows during training, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainwright.data.rows.pairs import CHOSEN
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.task import Measured
from trainwright.errors import RequestError
from trainwright.inference.answering import AnswerSettings, answer_all
from trainwright.inference.evaluation.measure import Sample
from trainwright.inference.evaluation.metrics import AnswerMatch, Judge, judges
from trainwright.inference.evaluation.rows import Column, drawn, last_run, wilson
from trainwright.inference.generation import Sampling, Stop
from trainwright.parallel.world import World
from trainwright.recipe.schema import EvaluateSection
from trainwright.utils import heartbeat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        self._judges = judges(section.metrics, section.answer_pattern, section.json_schema)
        answers = [n for n in range(validation.sequence_count) if validation.role(n) == CHOSEN]  # without rejected ones
        uncut = [n for n in answers if validation.sequence_length(n) < longest]
        spans = {n: last_run(validation.sequence(n)[1]) for n in uncut}
        with_question = [n for n in uncut if spans[n][0] > 0]
        if not with_question:
            raise RequestError(
                "evaluate.metrics: no validation row has a prompt and a full answer within data.max_length"
            )
        self._rows = chosen = [with_question[index] for index in drawn(len(with_question), section.generation_limit)]
        self._prompts: list[list[int]] = []
        self._references: list[str] = []
        for number in chosen:
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
        columns = {name: Column.of_rows(list(self._scores(judge, texts))) for name, judge in self._judges.items()}
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
            {name: wilson(c.value(), c.effective_rows) for name, c in columns.items() if c.is_proportion},
            samples,
            sum(not answer.complete for answer in answers),
            self._sampling.max_new_tokens,
        )

    def _scores(self, judge: Judge, texts: Sequence[str]) -> Iterator[float]:
        for reference, text in zip(self._references, texts, strict=True):
            yield judge(reference, text)
            heartbeat.progress()

    def _check_references(self) -> None:
        match = self._judges.get("answer")
        if not isinstance(match, AnswerMatch):
            return
        for reference in self._references:
            try:
                match.check(reference)
            except RequestError as error:
                raise RequestError(f"evaluate.answer_pattern: of a validation row {error}") from None
