"""Published measurements are met. `python -m tests.support.published` prints the table with the error of each."""

from __future__ import annotations

import statistics

import pytest

from tests.support.published import Compared, compare, errors, figures


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [compare(figure) for figure in figures()]


def test_every_figure_has_a_source_and_can_be_planned(compared: list[Compared]) -> None:
    assert len(compared) >= 100
    assert all(one.figure["source"]["url"].startswith("https://") for one in compared)
    assert all(one.tokens_per_second > 0 and one.memory_gib > 0 for one in compared)


def test_speeds_are_those_that_were_measured(compared: list[Compared]) -> None:
    found = errors(one.speed for one in compared)
    assert len(found) >= 100
    assert statistics.median(found) <= 0.15
    assert found[int(0.8 * len(found))] <= 0.35
