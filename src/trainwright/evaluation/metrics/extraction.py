"""Correctness of short answers in texts, which are extracted by a pattern and compared as numbers if both are."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from trainwright.errors import RequestError

# Named patterns. gsm8k: the format of https://github.com/openai/grade-school-math.
NAMED = {"gsm8k": r"####\s*\$?\s*(-?[\d.,]+)"}
NUMBER = "number"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")

Extract = Callable[[str], str | None]


def extractor(pattern: str) -> Extract:
    """Return a function that extracts the short answer from a text, or None if it has none.

    Args:
        pattern: ``gsm8k`` (what follows ``####``), ``number`` (the last number), or a regular expression: the first
            group of its first match, or the match if it has no group.

    Raises:
        RequestError: it is not a valid regular expression.
    """
    if pattern == NUMBER:
        return lambda text: next(reversed(_NUMBER.findall(text)), None)
    try:
        compiled = re.compile(NAMED.get(pattern, pattern))
    except re.error as error:
        raise RequestError(f"the answer pattern {pattern!r} is not a regular expression: {error}") from None
    group = 1 if compiled.groups else 0
    return lambda text: found[group] if (found := compiled.search(text)) else None


class AnswerMatch:
    """Score 1 if the short answer equals the reference's; an answer without a short answer is wrong."""

    setting = "answer_pattern"

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._extract = extractor(pattern)

    def check(self, reference: str) -> None:
        """Raise RequestError if the reference has no short answer."""
        if self._extract(reference) is None:
            shown = " ".join(reference.split())[-60:]
            raise RequestError(
                f"the pattern {self._pattern!r} matches no answer in the reference (it ends with {shown!r})"
            )

    def __call__(self, reference: str, answer: str) -> float:
        """Return 1 if both texts have the same short answer, else 0."""
        wanted, found = self._extract(reference), self._extract(answer)
        return float(wanted is not None and found is not None and same(wanted, found))


def same(one: str, other: str) -> bool:
    """Return whether two short answers are equal: 1,000.0 equals 1000, and 18. at the end of a sentence 18."""
    numbers = _as_number(one), _as_number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return one.strip() == other.strip()


def _as_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().replace(",", "").lstrip("$").rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
