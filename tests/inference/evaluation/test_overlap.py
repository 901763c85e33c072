"""Overlap of texts: against the package, and against definitions written out here."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from trainwright.inference.evaluation.metrics import exact_match, rouge_l, word_f1

WORDS = ["the", "cat", "sat", "on", "a", "mat", "Dogs", "running", "quickly", "18", "mat."]


def pairs(count: int = 200) -> list[tuple[str, str]]:
    chance = random.Random(0)
    return [
        tuple(" ".join(chance.choices(WORDS, k=chance.randrange(12))) for _ in range(2))  # type: ignore[misc]
        for _ in range(count)
    ]


def longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    if not one or not other:
        return 0
    rows = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one, 1):
        for j, b in enumerate(other, 1):
            rows[i][j] = rows[i - 1][j - 1] + 1 if a == b else max(rows[i - 1][j], rows[i][j - 1])
    return rows[-1][-1]


@pytest.mark.parametrize("stem", [False, True])
def test_rouge_l_is_that_of_the_package(stem: bool) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=stem)
    for reference, answer in pairs():
        expected = scorer.score(target=reference, prediction=answer)["rougeL"]
        assert rouge_l(reference, answer, stem=stem) == tuple(expected)


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    for reference, answer in pairs():
        wanted, found = (re.findall("[a-z0-9]+", text.lower()) for text in (reference, answer))
        common = longest_common(wanted, found)
        recall = common / len(wanted) if wanted else 0.0
        precision = common / len(found) if found else 0.0
        f1 = 2 * precision * recall / (precision + recall) if common else 0.0
        assert rouge_l(reference, answer) == pytest.approx((precision, recall, f1))


def test_rouge_l_by_hand() -> None:
    # "police killed the gunman" against "police kill the gunman": three of four words (Lin 2004, section 3.1).
    assert rouge_l("police killed the gunman", "police kill the gunman") == (0.75, 0.75, 0.75)
    assert rouge_l("police killed the gunman", "police kill the gunman", stem=True) == (1, 1, 1)
    assert rouge_l("a b c d", "x a y b") == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("Paris", "paris.", 1.0),
        ("the Eiffel Tower", "Eiffel Tower, in Paris", 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("a cat", "dogs", 0.0),
        ("", "", 1.0),
        ("the", "an", 1.0),  # articles alone
        ("cat cat", "cat", 2 / 3),
        ("cat", "", 0.0),
    ],
)
def test_f1_of_words_by_hand(reference: str, answer: str, score: float) -> None:
    assert word_f1(reference, answer) == pytest.approx(score)


def test_an_exact_match_is_to_the_letter() -> None:
    assert exact_match("Paris", " Paris\n") == 1
    assert exact_match("Paris", "paris") == exact_match("Paris", "Paris.") == 0
