"""Memorisation of texts, and membership inference: whether a model distinguishes its training texts from unseen ones.

Every attack gives a text a score that is low if the model has seen it. Its AUC is 1 if all members score below all
others, and 0.5 for a random guess.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LOWEST = 0.4  # fraction of the tokens that Min-K uses, as in MUSE


def loss_attack(losses: Floats) -> float:
    """Return the mean negative log-likelihood of the tokens [tokens] (Yeom et al., arXiv 1709.01604)."""
    return float(losses.mean())


def zlib_attack(losses: Floats, text: str) -> float:
    """Return the mean loss divided by the zlib-compressed size of the text in bytes (Carlini et al., arXiv
    2012.07805).
    """
    return float(losses.mean()) / len(zlib.compress(text.encode("utf-8")))


def reference_attack(losses: Floats, others: Floats) -> float:
    """Return the mean loss minus that of a model that has not seen the text (Carlini et al., arXiv 2012.07805)."""
    return float(losses.mean() - others.mean())


def min_k_attack(losses: Floats, share: float = LOWEST) -> float:
    """Return the mean loss of the least likely ``share`` of the tokens (Shi et al., arXiv 2310.16789)."""
    return float(np.sort(losses)[::-1][: max(1, int(len(losses) * share))].mean())


def min_k_plus_plus_attack(standardised: Floats, share: float = LOWEST) -> float:
    """Return Min-K of log-likelihoods standardized over the vocabulary (arXiv 2404.02936)."""
    return min_k_attack(-standardised, share)


def auc(members: Floats, others: Floats) -> float:
    """Return the probability that a member's score is below another's, counting ties half (Mann and Whitney)."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))
    above = ranks[len(members) :].sum() - len(others) * (len(others) + 1) / 2
    return float(above / (len(members) * len(others)))


def privleak(found: float, reference: float) -> float:
    """Return the percentage by which an attack's AUC differs from that on a model trained without the forget set (MUSE,
    arXiv 2407.06460, section 4.1).

    Near 0 is best; near -100 the texts are still known; above 0 they stand out as unknown.

    Args:
        found, reference: AUCs of Min-K as here; the paper's have the opposite orientation.
    """
    unseen = 1 - reference
    return float("inf") if unseen == 0 else 100 * ((1 - found) - unseen) / unseen


Bools = npt.NDArray[np.bool_]


def exact_memorisation(correct: Bools) -> float:
    """Return the fraction of tokens that are the most probable ones after their prefix (Tirumala et al., arXiv
    2205.10770).
    """
    return float(correct.mean()) if len(correct) else 0.0


def extraction_strength(correct: Bools) -> float:
    """Return the fraction of tokens at the end that are predicted right given their prefix: 1 - k / n for the smallest
    k from which on every token is the most probable one (Carlini et al., arXiv 2012.07805; as in arXiv 2406.09179).
    """
    wrong = np.flatnonzero(~correct)
    return 1.0 - (int(wrong[-1]) + 1) / len(correct) if len(wrong) else float(len(correct) > 0)
