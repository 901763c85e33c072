"""The findings of an evaluation on a benchmark, by set and item, and its output: a table, and a directory, written
completely or not at all.

    metrics.json   every metric, by set
    log.json       the same with the numbers of every item; see log.py
    samples.jsonl  prompts, references and answers, if the model generated any
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.inference.evaluation.report import complete_directory, number_text, table_lines, write_text
from trainwright.inference.scoring import TokenScores
from trainwright.tasks.unlearn.evaluation import statistics
from trainwright.tasks.unlearn.evaluation.encoding import ANSWER, PARAPHRASE, WRONG, ItemSequences
from trainwright.tasks.unlearn.evaluation.items import ItemSet
from trainwright.tasks.unlearn.evaluation.log import NAME, ReferenceLog, log_of

METRICS_FILE = "metrics.json"


@dataclass(frozen=True)
class BenchmarkReport:
    """The result of an evaluation on a benchmark.

    Attributes:
        metrics: values by metric and set.
        rows: the number of items of each set.
        about: the fields at the top of the log.
    """

    metrics: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, int]
    about: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: list[str]
    log: Mapping[str, Any]
    samples: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        findings: Findings,
        values: Mapping[str, Mapping[str, float]],
        about: Mapping[str, Any],
        settings: Mapping[str, Any],
        notes: list[str],
    ) -> BenchmarkReport:
        """Build the report from the findings."""
        samples = [
            {"set": name, "row": number + 1, "prompt": item.prompt, "reference": reference, "answer": answer}
            for name, answers in findings.answers.items()
            for number, (item, reference, answer) in enumerate(
                zip(findings.sets[name].items, findings.references[name], answers, strict=True)
            )
        ]
        rows = {name: len(each.items) for name, each in findings.sets.items()}
        return cls(values, rows, about, settings, notes, log_of(findings, values, about), samples)

    def save(self, file: Path) -> None:
        """Write the object to a file or directory."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def open(cls, file: Path) -> BenchmarkReport:
        """Read what ``save`` wrote."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def lines(self) -> list[str]:
        """Return the table and its notes."""
        rows = [
            [metric, name, number_text(value), f"{self.rows[name]:,}" if name in self.rows else ""]
            for metric, values in self.metrics.items()
            for name, value in values.items()
        ]
        return [*table_lines(rows, ("metric", "set", "value", "rows")), *(f"note: {note}" for note in self.notes)]

    def write(self, directory: Path) -> None:
        """Write all files to the new ``directory``. Raises RequestError if they cannot be written."""
        with complete_directory(directory) as scratch:
            content = {**self.about, "settings": self.settings, "metrics": self.metrics, "rows": self.rows}
            write_text(scratch / METRICS_FILE, json.dumps({**content, "notes": self.notes}, indent=2) + "\n")
            write_text(scratch / NAME, json.dumps(self.log) + "\n")
            if self.samples:
                lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in self.samples)
                write_text(scratch / "samples.jsonl", "".join(lines))


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SetScores:
    """Likelihoods of one set.

    Attributes:
        answers: of every item [items], each with the stop after it.
        text_targets: for each answer, how many of its first targets are text.
        paraphrases: of the items that have one, by item number.
        wrong: the wrong answers of every item; empty if they were not scored.
    """

    answers: list[TokenScores]
    text_targets: list[int]
    paraphrases: dict[int, TokenScores] = field(default_factory=dict)
    wrong: list[list[TokenScores]] = field(default_factory=list)

    @property
    def losses(self) -> Floats:
        """Return the mean negative log-likelihood of every answer [items], including the stop."""
        return np.array([mean_loss(each) for each in self.answers])

    @property
    def wrong_losses(self) -> list[Floats]:
        """Return the losses of the wrong answers of every item."""
        return [np.array([mean_loss(each) for each in wrong]) for wrong in self.wrong]

    @property
    def right_losses(self) -> Floats:
        """Return the losses of the right answers to compare with wrong ones [items]: of the paraphrase, if there is
        one.
        """
        right = [self.paraphrases.get(number, answer) for number, answer in enumerate(self.answers)]
        return np.array([mean_loss(each) for each in right])

    @property
    def truth_ratios(self) -> Floats:
        """Return the truth ratio of every item; all items must have wrong answers."""
        return statistics.truth_ratios(self.right_losses, self.wrong_losses)

    def text_losses(self, number: int) -> Floats:
        """Return the losses of the tokens of an answer's text."""
        return self.answers[number].losses[: self.text_targets[number]].astype(np.float64)

    def text_correct(self, number: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of an answer's text are the most probable ones."""
        return self.answers[number].correct[: self.text_targets[number]]


def mean_loss(scores: TokenScores) -> float:
    """Return the mean loss over the targets of a sequence."""
    return float(scores.losses.astype(np.float64).mean())


@dataclass(frozen=True)
class Findings:
    """The inputs of the metrics, as far as needed.

    Attributes:
        sets: the items, by the set's name.
        scores: likelihoods, by set.
        answers: the model's answers to every item, by set, and ``references`` the right ones.
        attacked: other numbers of every item by set, by their kind: ``standardized`` has those of every token,
            ``gradient_norm`` and ``other_losses`` one.
        reference: the reference values of another model.
    """

    sets: Mapping[str, ItemSet]
    scores: Mapping[str, SetScores] = field(default_factory=dict)
    answers: Mapping[str, list[str]] = field(default_factory=dict)
    references: Mapping[str, list[str]] = field(default_factory=dict)
    attacked: Mapping[str, Mapping[str, Sequence[Floats]]] = field(default_factory=dict)
    reference: ReferenceLog | None = None


def by_set(sequences: ItemSequences, scores: Sequence[TokenScores]) -> dict[str, SetScores]:
    """Return the scores of all sequences, grouped by set."""
    by_name: dict[str, SetScores] = {}
    for (name, item, what, _), number in sequences.places.items():
        each = by_name.setdefault(name, SetScores([], []))
        if what == ANSWER:
            assert item == len(each.answers), "sequences of a set are in the order of its items"
            each.answers.append(scores[number])
            each.text_targets.append(sequences.text_targets[number])
        elif what == PARAPHRASE:
            each.paraphrases[item] = scores[number]
        elif what == WRONG:
            each.wrong.extend([] for _ in range(item + 1 - len(each.wrong)))
            each.wrong[item].append(scores[number])
    return by_name
