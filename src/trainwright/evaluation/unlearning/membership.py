"""Membership inference: whether a model tells what it was trained on from what it has never seen.

Every attack gives a text a number that is low where the model has seen it. Its AUC is 1 where all members are below all
others, and 0.5 where the attack knows nothing.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LOWEST = 0.4  # share of the tokens that Min-K looks at, as MUSE does


def loss_attack(losses: Floats) -> float:
    """Mean negative log-likelihood of the tokens [tokens] (Yeom et al., arXiv 1709.01604)."""
    return float(losses.mean())


def zlib_attack(losses: Floats, text: str) -> float:
    """Return the mean loss, by how many bytes zlib makes of the text (Carlini et al., arXiv 2012.07805)."""
    return float(losses.mean()) / len(zlib.compress(text.encode("utf-8")))


def reference_attack(losses: Floats, others: Floats) -> float:
    """Return the mean loss, less that of a model that has not seen the text (Carlini et al., arXiv 2012.07805)."""
    return float(losses.mean() - others.mean())


def min_k_attack(losses: Floats, share: float = LOWEST) -> float:
    """Mean loss of the least likely ``share`` of the tokens (Shi et al., arXiv 2310.16789)."""
    return float(np.sort(losses)[::-1][: max(1, int(len(losses) * share))].mean())


def min_k_plus_plus_attack(standardised: Floats, share: float = LOWEST) -> float:
    """Return the same of log-likelihoods in standard deviations from the mean over the vocabulary (arXiv
    2404.02936).
    """
    return min_k_attack(-standardised, share)


def auc(members: Floats, others: Floats) -> float:
    """Probability that a member's number is below another's, with half of ties (Mann and Whitney)."""
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))
    above = ranks[len(members) :].sum() - len(others) * (len(others) + 1) / 2
    return float(above / (len(members) * len(others)))


def privleak(found: float, reference: float) -> float:
    """By how many per cent an attack is off what it is on a model that was trained without the forget set (MUSE, arXiv
    2407.06460, section 4.1): near 0 is best, near -100 the texts are still known, above 0 they stick out as unknown.

    Args:
        found, reference: AUCs of Min-K as here; the paper counts them the other way round.
    """
    unseen = 1 - reference
    return float("inf") if unseen == 0 else 100 * ((1 - found) - unseen) / unseen
