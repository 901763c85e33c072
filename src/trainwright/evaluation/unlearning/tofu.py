"""The statistics of TOFU (Maini et al., arXiv 2401.06121, section 2.2).

As in the authors' code, the wrong answers' likelihoods are averaged as log-likelihoods per token, so that the truth
ratio uses geometric means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def truth_ratios(right: Floats, wrong: Sequence[Floats]) -> Floats:
    """Return P(wrong | question) / P(right | question) of every item, each P normalized by length.

    Args:
        right: mean negative log-likelihood of the right answer, of its paraphrase if there is one [items].
        wrong: those of the wrong answers of every item.
    """
    with np.errstate(over="ignore"):  # may be infinite for a collapsed model
        return np.exp(right - np.array([each.mean() for each in wrong]))


def forget_truth_ratio(ratios: Floats) -> float:
    """Return the mean of min(R, 1/R): 1 if right and wrong are equally likely, the best value for the forget set."""
    with np.errstate(divide="ignore"):
        return float(np.minimum(ratios, 1 / ratios).mean())


def utility_truth_ratio(ratios: Floats) -> float:
    """Return the mean of max(0, 1 - R): 1 if wrong answers have no probability, the best value for retained
    knowledge.
    """
    return float(np.maximum(0, 1 - ratios).mean())


def option_probabilities(right: Floats, wrong: Sequence[Floats]) -> Floats:
    """Return P(right) / (P(right) + sum of P(wrong)) of every item; arguments as for ``truth_ratios``."""
    with np.errstate(over="ignore"):
        # Both divided by P(right), because the probabilities may underflow.
        odds = [np.exp(own - each).sum() for own, each in zip(right, wrong, strict=True)]
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
