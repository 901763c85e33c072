"""What is found out about a model, set by set and item by item; all metrics are made of this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainwright.evaluation.unlearning import tofu
from trainwright.evaluation.unlearning.encoding import ANSWER, PARAPHRASE, WRONG, Documents
from trainwright.evaluation.unlearning.items import ItemSet
from trainwright.evaluation.unlearning.log import ReferenceLog
from trainwright.inference.scoring import TokenScores

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SetScores:
    """Likelihoods of one set.

    Attributes:
        answers: of every item [items], each with the stop after it.
        text_targets: of every answer, how many of its targets, the first ones, are text.
        paraphrases: of the items that have one, by their number.
        wrong: of every item, its wrong answers; empty where they were not scored.
    """

    answers: list[TokenScores]
    text_targets: list[int]
    paraphrases: dict[int, TokenScores] = field(default_factory=dict)
    wrong: list[list[TokenScores]] = field(default_factory=list)

    @property
    def losses(self) -> Floats:
        """Mean negative log-likelihood of every answer [items], the stop counted."""
        return np.array([mean_loss(each) for each in self.answers])

    @property
    def wrong_losses(self) -> list[Floats]:
        """Those of the wrong answers of every item."""
        return [np.array([mean_loss(each) for each in wrong]) for wrong in self.wrong]

    @property
    def right_losses(self) -> Floats:
        """Those of what the wrong answers are weighed against [items]: the paraphrase, where there is one."""
        right = [self.paraphrases.get(number, answer) for number, answer in enumerate(self.answers)]
        return np.array([mean_loss(each) for each in right])

    @property
    def truth_ratios(self) -> Floats:
        """Of every item that has wrong answers; all have, or it cannot be asked for."""
        return tofu.truth_ratios(self.right_losses, self.wrong_losses)

    def text_losses(self, number: int) -> Floats:
        """Losses of the tokens of an answer's text."""
        return self.answers[number].losses[: self.text_targets[number]].astype(np.float64)

    def text_correct(self, number: int) -> npt.NDArray[np.bool_]:
        """Which of them are the likeliest tokens."""
        return self.answers[number].correct[: self.text_targets[number]]


def mean_loss(scores: TokenScores) -> float:
    """Over the targets of a document."""
    return float(scores.losses.astype(np.float64).mean())


@dataclass(frozen=True)
class Findings:
    """Everything that metrics are made of, as far as they were asked for.

    Attributes:
        sets: what was asked, by the set's name.
        scores: likelihoods, by set.
        answers: what the model wrote to every item, by set, and ``references`` what it should have.
        attacked: other numbers of every item by set, under the name of what they are for: ``standardised`` has those of
            every token, ``gradient_norm`` and ``other_losses`` one.
        reference: what was found out about another model.
    """

    sets: Mapping[str, ItemSet]
    scores: Mapping[str, SetScores] = field(default_factory=dict)
    answers: Mapping[str, list[str]] = field(default_factory=dict)
    references: Mapping[str, list[str]] = field(default_factory=dict)
    attacked: Mapping[str, Mapping[str, Sequence[Floats]]] = field(default_factory=dict)
    reference: ReferenceLog | None = None


def by_set(documents: Documents, scores: Sequence[TokenScores]) -> dict[str, SetScores]:
    """Return the scores of all documents, sorted into the sets that they are of."""
    found: dict[str, SetScores] = {}
    for (name, item, what, _), number in documents.places.items():
        each = found.setdefault(name, SetScores([], []))
        if what == ANSWER:
            assert item == len(each.answers), "documents of a set are in the order of its items"
            each.answers.append(scores[number])
            each.text_targets.append(documents.text_targets[number])
        elif what == PARAPHRASE:
            each.paraphrases[item] = scores[number]
        elif what == WRONG:
            each.wrong.extend([] for _ in range(item + 1 - len(each.wrong)))
            each.wrong[item].append(scores[number])
    return found
