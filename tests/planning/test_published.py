"""Published measurements are met. `python bench/plan_published.py` prints how well, by class."""

from __future__ import annotations

import json

import pytest

from tests.support.class_errors import class_errors
from tests.support.published import Compared
from tests.support.published_figures import CLASSES, class_of, figures, half_of, sources
from tests.support.published_table import HALVES, by_class, compared, errors, median, summarize
from trainwright.planning.errors import FILE

pytestmark = pytest.mark.slow  # it traces some thirty models

_KINDS = {"allocated", "reserved", "nvidia-smi", "unspecified"}


@pytest.fixture(scope="module")
def mended() -> list[Compared]:
    return compared("mend")


@pytest.fixture(scope="module")
def checked() -> list[Compared]:
    return compared("check")


def test_every_figure_says_what_was_run_where_and_how_it_ended() -> None:
    found = figures()
    assert len({figure["id"] for figure in found}) == len(found)
    for figure in found:
        assert figure["source"]["url"].startswith("https://"), figure["id"]
        assert figure["outcome"] in ("ran", "oom"), figure["id"]
        assert figure["outcome"] == "ran" or not figure["measured"], figure["id"]
        assert class_of(figure) in CLASSES, figure["id"]
        assert ("memory_gib" in figure["measured"]) == (figure["measured"].get("memory_kind") in _KINDS), figure["id"]


def test_a_source_is_on_the_side_where_its_address_falls() -> None:
    assert {source["url"]: source["used"] for source in sources()} == {
        source["url"]: half_of(source["url"]) for source in sources()
    }


def test_what_is_checked_is_enough(checked: list[Compared]) -> None:
    measured = [one.figure["measured"] for one in checked]
    assert sum("tokens_per_second_per_device" in one for one in measured) >= 60
    assert sum("memory_gib" in one for one in measured) >= 40
    assert sum(one.figure["outcome"] == "oom" for one in checked) >= 25
    assert sum(one.other is None and one.missing is None for one in checked) >= 20


def test_hardly_any_figure_cannot_be_planned(mended: list[Compared], checked: list[Compared]) -> None:
    missing = [one.figure["id"] for one in [*mended, *checked] if one.missing is not None]
    assert len(missing) <= 0.2 * len([*mended, *checked]), missing
    planned = [one for one in mended if one.missing is None and one.other is None]
    assert all(one.tokens_per_second > 0 and one.memory_gib > 0 for one in planned)


def test_speeds_are_those_that_were_measured(mended: list[Compared]) -> None:
    found = errors(one.speed for one in mended)
    assert len(found) >= 40
    assert (median(found) or 0) <= 0.2
    assert found[int(0.8 * len(found))] <= 0.5


def test_a_summary_counts_every_run_once(mended: list[Compared], checked: list[Compared]) -> None:
    for found in (mended, checked):
        classes = by_class(found)
        whole = classes.pop("all")
        assert whole == summarize(found)
        assert sum(one.runs for one in classes.values()) == whole.runs == len(found)
        others = sum(one.other is not None for one in found)
        assert whole.ran + whole.ran_out + whole.unplanned + others == whole.runs
    assert HALVES == ("mend", "check")


def test_the_intervals_of_plans_are_those_of_these_figures(mended: list[Compared], checked: list[Compared]) -> None:
    made = class_errors([*mended, *checked])["classes"]
    kept = json.loads(FILE.read_text(encoding="utf-8"))["classes"]
    assert made.keys() == kept.keys()
    for kind, of_class in made.items():
        for what, interval in of_class.items():
            assert (interval is None) == (kept[kind][what] is None), (kind, what)
            for end in ("low", "high") if interval else ():
                assert kept[kind][what][end] == pytest.approx(interval[end], rel=0.02), (kind, what, end)
