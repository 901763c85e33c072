"""How much of a reference's text an answer has."""

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
    """How much of the words of a reference answer are in an answer."""

    precision: float
    recall: float
    f1: float


def exact_match(reference: str, answer: str) -> float:
    """1 where the texts are the same, white space around them aside."""
    return float(reference.strip() == answer.strip())


def word_f1(reference: str, answer: str) -> float:
    """F1 of the words that both have, without case, punctuation and articles, as SQuAD has it (arXiv 1606.05250)."""
    wanted, found = _words(reference), _words(answer)
    if not wanted or not found:
        return float(wanted == found)
    common = sum((Counter(wanted) & Counter(found)).values())
    return 2 * common / (len(wanted) + len(found))


def rouge_l(reference: str, answer: str, *, stem: bool = False) -> Overlap:
    """ROUGE-L as the package rouge-score has it: overlap by the longest common subsequence of words (Lin 2004).

    Args:
        stem: compare the stems of words (Porter).
    """
    score = _rouge_scorer(stem).score(reference, answer)["rougeL"]
    return Overlap(score.precision, score.recall, score.fmeasure)


def rouge_l_f1(reference: str, answer: str) -> float:
    """F1 of ``rouge_l``."""
    return rouge_l(reference, answer).f1


def rouge_l_recall(reference: str, answer: str) -> float:
    """Recall of ``rouge_l``."""
    return rouge_l(reference, answer).recall


@functools.cache
def _rouge_scorer(stem: bool) -> Any:
    require("rouge_score", "rouge_l")
    if os.path.expanduser("~") == "~":  # nltk, of which it uses the stemmer, asks for a place to download to
        os.environ.setdefault("NLTK_DATA", tempfile.gettempdir())
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=stem)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
