"""The statistics of TOFU, MUSE and membership inference: worked by hand, and as other implementations have them."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from scipy.stats import hmean, ks_2samp
from sklearn.metrics import roc_auc_score

from trainwright.tasks.unlearn.evaluation import statistics


def test_truth_ratio_by_hand() -> None:
    # exp(mean of the wrong losses is 3, right 1): wrong answers are e^-2 as likely as the right one.
    ratios = statistics.compute_truth_ratios(np.array([1.0, 2.0]), [np.array([2.0, 4.0]), np.array([1.0, 1.0, 1.0])])
    assert ratios == pytest.approx([math.exp(-2), math.e])
    assert statistics.compute_forget_truth_ratio(ratios) == pytest.approx((math.exp(-2) + math.exp(-1)) / 2)
    assert statistics.compute_utility_truth_ratio(ratios) == pytest.approx((1 - math.exp(-2)) / 2)


def test_option_probabilities_by_hand() -> None:
    right, wrong = -np.log([0.5, 0.1]), [-np.log([0.25, 0.25]), -np.log([0.1, 0.1, 0.1])]
    assert statistics.compute_option_probabilities(right, wrong) == pytest.approx([0.5, 0.25])


@pytest.mark.filterwarnings("error")
def test_a_model_that_has_collapsed_has_numbers_too() -> None:
    # Probabilities of e^-2000 and e^-4000 are 0 to a computer.
    right, wrong = np.array([2000.0, 4000.0]), [np.array([4000.0, 4000.0]), np.array([2000.0])]
    ratios = statistics.compute_truth_ratios(right, wrong)
    assert ratios.tolist() == [0.0, math.inf]
    assert (
        statistics.compute_forget_truth_ratio(ratios) == 0.0 and statistics.compute_utility_truth_ratio(ratios) == 0.5
    )
    assert statistics.compute_option_probabilities(right, wrong).tolist() == [1.0, 0.0]
    assert 0 < statistics.forget_quality(ratios, np.array([0.5, 1.0])) <= 1


def test_forget_quality_is_the_kolmogorov_smirnov_test() -> None:
    drawn = np.random.default_rng(0)
    one, other = np.exp(drawn.normal(size=60)), np.exp(drawn.normal(0.7, size=45))
    assert statistics.forget_quality(one, other) == ks_2samp(1 / one, 1 / other).pvalue
    assert statistics.forget_quality(one, one) == 1.0
    # Two sets of n that do not overlap: of all ways to order them, two are as far apart.
    apart = statistics.forget_quality(np.arange(20.0), np.arange(20.0) + 100)
    assert apart == pytest.approx(2 / math.comb(40, 20), rel=1e-6)


def test_model_utility_is_a_harmonic_mean_of_nine() -> None:
    values = [0.1, 0.9, 0.5, 0.7, 0.3, 0.8, 0.6, 0.4, 0.2]
    assert statistics.model_utility(values) == pytest.approx(hmean(values))
    assert statistics.model_utility([*values[:-1], 0.0]) == 0.0
    with pytest.raises(ValueError, match="nine"):
        statistics.model_utility(values[:-1])


@pytest.mark.parametrize(
    ("correct", "exact", "strength"),
    [
        ([True, True, True, True], 1.0, 1.0),
        ([False, True, False, True], 0.5, 0.25),  # all after the third token comes out right
        ([False, True, True, True], 0.75, 0.75),
        ([True, True, True, False], 0.75, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_memorisation_by_hand(correct: list[bool], exact: float, strength: float) -> None:
    flags = np.array(correct, dtype=np.bool_)
    assert statistics.exact_memorisation(flags) == exact
    assert statistics.extraction_strength(flags) == strength


def test_attacks_by_hand() -> None:
    losses = np.array([0.5, 4.0, 1.0, 3.0, 1.5])
    assert statistics.compute_loss_attack(losses) == 2.0
    assert statistics.compute_reference_attack(losses, np.array([1.0, 2.0])) == 0.5
    assert statistics.compute_zlib_attack(losses, "abcabcabc") == 2.0 / len(zlib.compress(b"abcabcabc"))
    assert statistics.compute_min_k_attack(losses) == 3.5  # two of five
    assert statistics.compute_min_k_attack(losses, 0.01) == 4.0  # at least one
    assert statistics.compute_min_k_plus_plus_attack(-losses) == 3.5


def test_auc_counts_pairs() -> None:
    drawn = np.random.default_rng(1)
    members, others = drawn.integers(0, 9, 31).astype(float), drawn.integers(3, 12, 17).astype(float)
    pairs = [(one < other) + 0.5 * (one == other) for one in members for other in others]
    assert statistics.compute_auc(members, others) == pytest.approx(np.mean(pairs))
    labels = np.concatenate([np.ones(31), np.zeros(17)])
    assert statistics.compute_auc(members, others) == pytest.approx(
        roc_auc_score(labels, -np.concatenate([members, others]))
    )
    assert statistics.compute_auc(np.zeros(3), np.ones(4)) == 1.0
    assert statistics.compute_auc(np.ones(5), np.ones(4)) == 0.5


def test_privleak_by_hand() -> None:
    assert statistics.privleak(1.0, 0.5) == -100.0  # all is still known
    assert statistics.privleak(0.5, 0.5) == 0.0
    assert statistics.privleak(0.25, 0.5) == 50.0  # it sticks out
    assert statistics.privleak(0.5, 1.0) == math.inf


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "the the the the the the the the the the",
        "He wrote it. He wrote it. He wrote it. He wrote it. He wrote it.",
        "qxz 3fk;; zzrt #@! wkkpt",
        "x" * 60,
    ],
)
def test_gibberish(answer: str) -> None:
    assert statistics.is_gibberish(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "Jaime Vasquez was born on the 25th of February, 1958.",
        "Paris",
        "1472",
        "£55,000",
        "I'm not certain about that.",
        "Его зовут Иван Петров.",
        'His books include "Granite Glossary", "Shale Stories", and "A Handbook of Karachi Minerals".',
    ],
)
def test_language(answer: str) -> None:
    assert not statistics.is_gibberish(answer)


def test_fluency_by_hand() -> None:
    # Runs of two: ab twice of 4, ba, and aa; of three: each once.
    two = -(2 * 0.25 * math.log2(0.25) + 0.5 * math.log2(0.5))
    assert statistics.fluency("a b a a b") == pytest.approx((2 / 3 * two + 4 / 3 * math.log2(3)) / 2)
    assert statistics.fluency("no no no no no") == 0.0
    assert statistics.fluency("one") == 0.0
