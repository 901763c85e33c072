"""Simple measures, without another model, of whether an answer is natural language."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[^\W\d_]+(['’.-][^\W\d_]+)*|[#$£€]?\d[\d.,:/%-]*(st|nd|rd|th|s)?")
_VOWEL = re.compile(r"[aeiouyàáâãäåæèéêëìíîïòóôõöøùúûüýœ]", re.IGNORECASE)
_MARKS = "\"'“”‘’«».,;:!?()[]{}<>*_`~–—-…"
_LONGEST = 25  # letters of a word
_LATIN = re.compile(r"[a-z]", re.IGNORECASE)


def is_gibberish(answer: str) -> bool:
    """Return whether an answer is empty, repeats itself, or does not consist of words.

    Repeats itself: it has at least 8 words, and over half of its trigrams occurred before. A word: letters with a vowel
    among them (if they are Latin and more than three), at most 25, or a number; at least half of the parts between
    spaces must be words.
    """
    words = answer.split()
    if not words:
        return True
    runs = list(zip(words, words[1:], words[2:], strict=False))
    if len(words) >= 8 and len(set(runs)) < len(runs) / 2:
        return True
    return sum(map(_is_word, words)) < len(words) / 2


def fluency(answer: str) -> float:
    """Return the entropy in bits of an answer's bigrams and trigrams, weighted 2 to 4 (Meng et al., arXiv 2202.05262,
    after Zhang et al., arXiv 1809.05972): low if it repeats itself, 0 if it has none.
    """
    words = answer.split()
    return (2 / 3 * _entropy(words, 2) + 4 / 3 * _entropy(words, 3)) / 2


def _entropy(words: Sequence[str], length: int) -> float:
    counts = Counter(tuple(words[i : i + length]) for i in range(len(words) - length + 1))
    total = sum(counts.values())
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def _is_word(text: str) -> bool:
    bare = text.strip(_MARKS)
    if not bare:
        return text in ("-", "–", "—", "…")
    if len(bare) > _LONGEST or not _WORD.fullmatch(bare):
        return False
    return len(bare) <= 3 or not _LATIN.search(bare) or bool(_VOWEL.search(bare))
