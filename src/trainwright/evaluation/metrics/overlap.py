"""Overlap of an answer with the text of a reference."""

from __future__ import annotations

import functools
import os
import re
import string
import tempfile
from collections import Counter
from typing import Any, NamedTuple

from trainwright.evaluation.libraries import require

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Overlap(NamedTuple):
    """Overlap of the words of a reference answer and an answer."""

    precision: float
    recall: float
    f1: float


def exact_match(reference: str, answer: str) -> float:
    """Return 1 if the texts are equal except for surrounding white space, else 0."""
    return float(reference.strip() == answer.strip())


def word_f1(reference: str, answer: str) -> float:
    """Return the F1 of common words, ignoring case, punctuation and articles, as in SQuAD (arXiv 1606.05250)."""
    wanted, found = _words(reference), _words(answer)
    if not wanted or not found:
        return float(wanted == found)
    common = sum((Counter(wanted) & Counter(found)).values())
    return 2 * common / (len(wanted) + len(found))


def rouge_l(reference: str, answer: str, *, stem: bool = False) -> Overlap:
    """Return ROUGE-L as the package rouge-score computes it: overlap by the longest common subsequence of words (Lin
    2004).

    Args:
        stem: compare the stems of words (Porter).
    """
    score = _rouge_scorer(stem).score(reference, answer)["rougeL"]
    return Overlap(score.precision, score.recall, score.fmeasure)


def rouge_l_f1(reference: str, answer: str) -> float:
    """Return the F1 of ``rouge_l``."""
    return rouge_l(reference, answer).f1


def rouge_l_recall(reference: str, answer: str) -> float:
    """Return the recall of ``rouge_l``."""
    return rouge_l(reference, answer).recall


@functools.cache
def _rouge_scorer(stem: bool) -> Any:
    require("rouge_score", "rouge_l")
    if os.path.expanduser("~") == "~":  # nltk, whose stemmer it uses, needs a download directory
        os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=stem)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
