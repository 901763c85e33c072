"""Metrics of columns, and how far they may be off."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from trainwright.inference.evaluation.measure import build_likelihood_columns
from trainwright.inference.evaluation.rows import Column, estimate, estimate_difference
from trainwright.inference.scoring import TokenScores


def scores(losses: list[float], correct: list[bool]) -> TokenScores:
    return TokenScores(np.array(losses, dtype=np.float32), np.array(correct))


def test_likelihoods_by_hand() -> None:
    rows = [scores([1.0, 2.0, 3.0], [True, False, False]), scores([0.5], [True])]
    names = ["loss", "perplexity", "token_accuracy", "answer_probability"]
    columns = build_likelihood_columns(names, rows, [2, 1])
    assert list(columns) == names
    assert columns["loss"].value() == pytest.approx(6.5 / 4)  # over targets, not over rows
    assert columns["perplexity"].value() == pytest.approx(np.exp(6.5 / 4))
    assert columns["token_accuracy"].value() == 0.5
    assert columns["answer_probability"].value() == pytest.approx((np.exp(-2.5) + np.exp(-0.5)) / 2)
    assert columns["loss"].row(0) == 2.0 and columns["perplexity"].row(1) == pytest.approx(np.exp(0.5))


def test_a_row_without_an_answer_has_no_answer_probability() -> None:
    rows = [scores([1.0], [True]), scores([2.0], [True])]
    column = build_likelihood_columns(["answer_probability"], rows, [0, 1])["answer_probability"]
    assert column.value() == pytest.approx(np.exp(-2.0)) and column.row(0) is None


def test_an_interval_is_that_of_resampled_rows() -> None:
    chance = np.random.default_rng(1)
    values, weights = chance.gamma(2.0, 3.0, 80), chance.integers(1, 20, 80).astype(float)
    found = estimate(Column(values, weights))
    resampled = []
    for _ in range(4000):
        rows = chance.integers(0, 80, 80)
        resampled.append(values[rows].sum() / weights[rows].sum())
    low, high = np.percentile(resampled, [2.5, 97.5])
    width = high - low
    assert found.value == values.sum() / weights.sum() and found.n == 80
    assert found.low is not None and found.high is not None
    assert abs(found.low - low) < 0.1 * width and abs(found.high - high) < 0.1 * width


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    chance, held = np.random.default_rng(2), 0
    for _ in range(100):
        found = estimate(Column.of_rows(list((chance.random(60) < 0.3).astype(float))), resamples=500)
        assert found.low is not None and found.high is not None
        held += found.low <= 0.3 <= found.high
    assert 87 <= held <= 100


def test_a_difference_is_of_the_same_rows() -> None:
    chance = np.random.default_rng(3)
    hard = chance.normal(0, 10, 200)  # rows differ much more than the models do
    one, other = Column.of_rows(list(hard + 1 + chance.normal(0, 0.1, 200))), Column.of_rows(list(hard))
    found = estimate_difference(one, other)
    assert found.low is not None and found.high is not None
    assert found.value == pytest.approx(1, abs=0.05) and 0.95 < found.low < 1 < found.high < 1.05
    alone = estimate(one)
    assert alone.low is not None and alone.high is not None and alone.high - alone.low > 1
    assert (found.high - found.low) < 0.1


def test_of_one_row_there_is_no_interval_and_of_equal_rows_it_is_a_point() -> None:
    assert estimate(Column.of_rows([0.5])).low is None
    found = estimate(Column.of_rows([0.5] * 10))
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    assert estimate_difference(Column.of_rows([0.5] * 10), Column.of_rows([0.5] * 10)).low == 0


def test_an_estimate_is_the_same_each_time() -> None:
    column = Column.of_rows(list(np.random.default_rng(4).random(50)))
    assert estimate(column) == estimate(column)


def test_a_proportion_has_the_interval_of_wilson_also_at_its_ends() -> None:
    for right, count in ((0, 24), (24, 24), (7, 30)):
        found = estimate(Column.of_rows([1.0] * right + [0.0] * (count - right)))
        expected = binomtest(right, count).proportion_ci(0.95, "wilson")
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    tokens = Column(np.array([0.0, 0.0, 0.0]), np.array([5.0, 9.0, 4.0]))  # no token of any row is right
    found = estimate(tokens)
    assert found.low == 0.0 and found.high is not None and found.high > 0.5
    scores = Column.of_rows([0.0, 0.5, 1.0, 1.0])  # not a proportion
    assert estimate(scores).high != estimate(Column.of_rows([0.0, 0.0, 1.0, 1.0])).high


def test_proportions_of_the_same_rows_differ_by_the_interval_of_newcombe() -> None:
    none = Column.of_rows([0.0] * 20)
    found = estimate_difference(none, none)
    assert found.value == 0.0 and found.low is not None and found.high is not None and found.low < 0 < found.high
    # Newcombe 1998, table II: 36 of 50 and 27 of 50 with 20 in both give 0.18 and about -0.03 to 0.36.
    one = Column.of_rows([1.0] * 20 + [1.0] * 16 + [0.0] * 7 + [0.0] * 7)
    other = Column.of_rows([1.0] * 20 + [0.0] * 16 + [1.0] * 7 + [0.0] * 7)
    found = estimate_difference(one, other)
    assert found.value == pytest.approx(0.18) and found.low is not None and found.high is not None
    assert -0.05 < found.low < 0.02 and 0.33 < found.high < 0.37
