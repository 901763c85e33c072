"""The statistics of TOFU (Maini et al., arXiv 2401.06121, section 2.2).

As in the authors' code, the wrong answers' likelihoods are averaged as log-likelihoods a token, so that the truth ratio
is of geometric means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def truth_ratios(right: Floats, wrong: Sequence[Floats]) -> Floats:
    """P(wrong | question) / P(right | question) of every item, each P normalised by its length.

    Args:
        right: mean negative log-likelihood of the right answer, in other words where there are such [items].
        wrong: those of the wrong answers of every item.
    """
    with np.errstate(over="ignore"):  # of a model that has collapsed it may be infinite
        return np.exp(right - np.array([each.mean() for each in wrong]))


def forget_truth_ratio(ratios: Floats) -> float:
    """Mean of min(R, 1/R): 1 where right and wrong are equally likely, which is best for what is forgotten."""
    with np.errstate(divide="ignore"):
        return float(np.minimum(ratios, 1 / ratios).mean())


def utility_truth_ratio(ratios: Floats) -> float:
    """Mean of max(0, 1 - R): 1 where wrong answers are all but impossible, which is best for what is kept."""
    return float(np.maximum(0, 1 - ratios).mean())


def option_probabilities(right: Floats, wrong: Sequence[Floats]) -> Floats:
    """P(right) / (P(right) + sum of P(wrong)) of every item; arguments as for ``truth_ratios``."""
    with np.errstate(over="ignore"):
        # Both divided by P(right), which like the others may be too small for a number.
        odds = [np.exp(own - each).sum() for own, each in zip(right, wrong, strict=True)]
    return 1 / (1 + np.array(odds))


def forget_quality(ratios: Floats, reference: Floats) -> float:
    """How alike the truth ratios on the forget set are to those of a model that has never seen it: the p-value of a
    two-sample Kolmogorov-Smirnov test, near 0 where they are told apart."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(ratios, reference).pvalue)


def model_utility(values: Sequence[float]) -> float:
    """Harmonic mean of probability, ROUGE-L recall and truth ratio, each on the retain set, real authors and world
    facts; 0 where one of the nine is 0."""
    if len(values) != 9:
        raise ValueError(f"model utility is made of nine numbers, not {len(values)}")
    return 0.0 if min(values) <= 0 else float(len(values) / sum(1 / value for value in values))
