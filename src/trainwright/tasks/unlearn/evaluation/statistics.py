"""The formulas of the metrics of unlearning: membership inference, memorisation, quality of text, and TOFU's."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LOWEST = 0.4  # fraction of the tokens that Min-K uses, as in MUSE


# Membership inference: whether a model distinguishes its training texts from unseen ones. Every attack gives a text a
# score that is low if the model has seen it. Its AUC is 1 if all members score below all others, and 0.5 for a random
# guess.
Bools = npt.NDArray[np.bool_]
_WORD = re.compile(r"[^\W\d_]+(['’.-][^\W\d_]+)*|[#$£€]?\d[\d.,:/%-]*(st|nd|rd|th|s)?")
_VOWEL = re.compile(r"[aeiouyàáâãäåæèéêëìíîïòóôõöøùúûüýœ]", re.IGNORECASE)
_MARKS = "\"'“”‘’«».,;:!?()[]{}<>*_`~–—-…"
_LONGEST = 25  # letters of a word
_LATIN = re.compile(r"[a-z]", re.IGNORECASE)


def compute_loss_attack(losses: Floats) -> float:
    """Return the mean negative log-likelihood of the tokens [tokens] (Yeom et al., arXiv 1709.01604)."""
    return float(losses.mean())


def compute_zlib_attack(losses: Floats, text: str) -> float:
    """Return the mean loss by the zlib-compressed size of the text in bytes (Carlini et al., arXiv 2012.07805)."""
    return float(losses.mean()) / len(zlib.compress(text.encode("utf-8")))


def compute_reference_attack(losses: Floats, others: Floats) -> float:
    """Return the mean loss minus that of a model that has not seen the text (Carlini et al., arXiv 2012.07805)."""
    return float(losses.mean() - others.mean())


def compute_min_k_attack(losses: Floats, share: float = LOWEST) -> float:
    """Return the mean loss of the least likely ``share`` of the tokens (Shi et al., arXiv 2310.16789)."""
    return float(np.sort(losses)[::-1][: max(1, int(len(losses) * share))].mean())


def compute_min_k_plus_plus_attack(standardized: Floats, share: float = LOWEST) -> float:
    """Return Min-K of log-likelihoods standardized over the vocabulary (arXiv 2404.02936)."""
    return compute_min_k_attack(-standardized, share)


def compute_auc(members: Floats, others: Floats) -> float:
    """Return the probability that a member's score is below another's, counting ties half (Mann and Whitney)."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))
    above = ranks[len(members) :].sum() - len(others) * (len(others) + 1) / 2
    return float(above / (len(members) * len(others)))


def privleak(measured: float, reference: float) -> float:
    """Return the percentage by which an attack's AUC differs from that on a model trained without the forget set (MUSE,
    arXiv 2407.06460, section 4.1).

    Near 0 is best; near -100 the texts are still known; above 0 they stand out as unknown.

    Args:
        measured, reference: AUCs of Min-K as here; the paper's have the opposite orientation.
    """
    unseen = 1 - reference
    return float("inf") if unseen == 0 else 100 * ((1 - measured) - unseen) / unseen


def exact_memorisation(correct: Bools) -> float:
    """Return the fraction of tokens that are the most probable after their prefix (Tirumala, arXiv 2205.10770)."""
    return float(correct.mean()) if len(correct) else 0.0


def extraction_strength(correct: Bools) -> float:
    """Return the fraction of tokens at the end that are predicted right given their prefix: 1 - k / n for the smallest
    k from which on every token is the most probable one (Carlini et al., arXiv 2012.07805; as in arXiv 2406.09179).
    """
    wrong = np.flatnonzero(~correct)
    return 1.0 - (int(wrong[-1]) + 1) / len(correct) if len(wrong) else float(len(correct) > 0)


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
    return (2 / 3 * _compute_entropy(words, 2) + 4 / 3 * _compute_entropy(words, 3)) / 2


def _compute_entropy(words: Sequence[str], length: int) -> float:
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


# The statistics of TOFU (Maini et al., arXiv 2401.06121, section 2.2). As in the authors' code, the wrong answers'
# likelihoods are averaged as log-likelihoods per token, so that the truth ratio uses geometric means.


def compute_truth_ratios(right: Floats, wrong: Sequence[Floats]) -> Floats:
    """Return P(wrong | question) / P(right | question) of every item, each P normalized by length.

    Args:
        right: mean negative log-likelihood of the right answer, of its paraphrase if there is one [items].
        wrong: those of the wrong answers of every item.
    """
    with np.errstate(over="ignore"):  # may be infinite for a collapsed model
        return np.exp(right - np.array([losses.mean() for losses in wrong]))


def compute_forget_truth_ratio(ratios: Floats) -> float:
    """Return the mean of min(R, 1/R): 1 if right and wrong are equally likely, the best value for the forget set."""
    with np.errstate(divide="ignore"):
        return float(np.minimum(ratios, 1 / ratios).mean())


def compute_utility_truth_ratio(ratios: Floats) -> float:
    """Return the mean of max(0, 1 - R): 1 if wrong answers have no probability, best for retained knowledge."""
    return float(np.maximum(0, 1 - ratios).mean())


def compute_option_probabilities(right: Floats, wrong: Sequence[Floats]) -> Floats:
    """Return P(right) / (P(right) + sum of P(wrong)) of every item; arguments as for ``compute_truth_ratios``."""
    with np.errstate(over="ignore"):
        # Both divided by P(right), because the probabilities may underflow.
        odds = [np.exp(right_loss - wrong_losses).sum() for right_loss, wrong_losses in zip(right, wrong, strict=True)]
    return 1 / (1 + np.array(odds))


def forget_quality(ratios: Floats, reference: Floats) -> float:
    """Return the p-value of a two-sample Kolmogorov-Smirnov test between the truth ratios on the forget set and those
    of a model not trained on it: near 0 if they differ.
    """
    from scipy.stats import ks_2samp

    return float(ks_2samp(ratios, reference).pvalue)


def model_utility(values: Sequence[float]) -> float:
    """Return the harmonic mean of probability, ROUGE-L recall and truth ratio, each on the retain set, real authors and
    world facts; 0 if one of the nine is 0.
    """
    if len(values) != 9:
        raise ValueError(f"model utility is made of nine numbers, not {len(values)}")
    return 0.0 if min(values) <= 0 else float(len(values) / sum(1 / value for value in values))
