"""Short answers inside texts."""

from __future__ import annotations

import pytest

from trainwright.errors import RequestError
from trainwright.inference.evaluation.metrics import AnswerMatch, build_extractor, is_same_answer


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("gsm8k", "She makes 9 * 2 = 18 dollars.\n#### 18", "18"),
        ("gsm8k", "so\n#### -1,234.50 and\n#### 7", "-1,234.50"),
        ("gsm8k", "####$ 5", "5"),
        ("gsm8k", "the answer is 18", None),
        ("number", "3 of 1,000.5 are 30.", "30"),
        ("number", "it is -4", "-4"),
        ("number", "none", None),
        (r"answer is (\w+)", "the answer is Paris, or so", "Paris"),
        (r"[A-D]\b", "I choose B or C", "B"),
    ],
)
def test_what_is_found(pattern: str, text: str, found: str | None) -> None:
    assert build_extractor(pattern)(text) == found


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("18", "18.", True),
        ("18", "18.00", True),
        ("1,000", "1000", True),
        ("$5", "5", True),
        ("0.1", "0.10000000000000001", False),
        ("18", "19", False),
        ("Paris", " Paris", True),
        ("Paris", "paris", False),
        ("nan", "nan", True),
        (".", ",", False),
    ],
)
def test_short_answers_are_compared_as_numbers_where_both_are(one: str, other: str, equal: bool) -> None:
    assert is_same_answer(one, other) is equal


def test_an_answer_without_one_is_wrong_and_a_reference_without_one_refused() -> None:
    match = AnswerMatch("gsm8k")
    assert match("#### 18", "it is 18\n#### 18") == 1
    assert match("#### 18", "it is 18") == 0
    match.check("#### 18")
    with pytest.raises(RequestError, match="the pattern 'gsm8k' matches no answer in the reference"):
        match.check("it is 18")


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="is not a regular expression: missing"):
        build_extractor("(")
