"""Pages in a real browser: everything is drawn, answers the pointer, fits, and asks no network for anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainwright as tw
from tests.observe.reports.test_reports import HOSTILE, evaluate, finished, start, step, written
from tests.support.browser import Browser, Opened, Scheme, chromium

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def drawn(browser: Browser, page: Path, width: int = 1280, scheme: Scheme = "light") -> Opened:
    """The page once all its charts are drawn."""
    opened = browser.open(page.as_uri(), width, scheme=scheme)
    opened.until(
        "document.querySelectorAll('.chart svg').length === document.querySelectorAll('.chart').length"
        " - document.querySelectorAll('details:not([open]) .chart').length"
    )
    return opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_report_and_a_comparison_are_drawn_and_fit(
    browser: Browser, tmp_path: Path, width: int, scheme: Scheme
) -> None:
    one, two = finished(tmp_path / "one"), finished(tmp_path / f"two{'-and-more' * 12}", 0.5)
    compared = tw.compare(one, two, out=tmp_path / "page.html").page
    assert compared is not None
    for file, charts in ((tw.report(one), 7), (compared, 5)):
        opened = drawn(browser, file, width, scheme)
        page = opened.page
        assert page.locator(".chart").count() >= charts
        assert page.locator('[aria-label="Training loss"]').count() >= 1
        assert opened.overflow() <= 0
        outside = (
            "[...document.querySelectorAll('.chart svg')].filter(e => e.getBoundingClientRect().right > innerWidth)"
        )
        assert page.evaluate(f"{outside}.length") == 0
        assert (opened.complaints, opened.barriers()) == ([], [])
        assert [each for each in opened.requests if not each.startswith(("file:", "data:"))] == []


def test_a_curve_shows_values_and_is_zoomed_by_the_pointer(browser: Browser, tmp_path: Path) -> None:
    opened = drawn(browser, tw.report(finished(tmp_path / "run")))
    page = opened.page
    chart = page.locator("#chart-0 svg")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#vg-tooltip-element.visible")
    labels = "[...document.querySelectorAll('#chart-0 .role-axis-label text')].map(e => e.textContent).join()"
    before = page.evaluate(labels)
    page.mouse.wheel(0, -600)
    opened.until(f"{labels} !== {before!r}")
    page.select_option("#axis", "tokens")
    opened.until("document.querySelector('#chart-0 svg').textContent.includes('Tokens')")


def test_a_zoom_by_the_wheel_and_a_drag_ends_with_a_double_click(browser: Browser, tmp_path: Path) -> None:
    opened = drawn(browser, tw.report(finished(tmp_path / "run")))
    page = opened.page
    box = page.locator("#chart-0 svg").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    # The labels of the axes and their places, in an order of their own: Vega puts those that come back at the end.
    labels = "[...document.querySelectorAll('#chart-0 .role-axis-label text')]"
    domain = f"{labels}.map(e => e.textContent + e.getAttribute('transform')).sort().join()"
    whole = page.evaluate(domain)
    page.mouse.move(*middle)
    page.mouse.wheel(0, -600)
    opened.until(f"{domain} !== {whole!r}")
    zoomed = page.evaluate(domain)
    page.mouse.down()
    page.mouse.move(middle[0] + 80, middle[1], steps=5)
    page.mouse.up()
    opened.until(f"{domain} !== {zoomed!r}")
    page.mouse.dblclick(*middle)
    opened.until(f"{domain} === {whole!r}")


def test_a_curve_is_smoothed_with_the_raw_line_behind_and_gaps_stay(browser: Browser, tmp_path: Path) -> None:
    steps = [step(n, 100.0 + n, 2.0 + n % 2) for n in (1, 2, 3, 4, 8, 9, 10)]
    opened = drawn(browser, tw.report(written(tmp_path / "run", start(100.0), *steps)))
    lines = "document.querySelectorAll('#chart-0 [aria-roledescription=\"line mark\"]')"
    assert opened.page.evaluate(f"{lines}.length") == 2, "one on each side of the gap"
    opened.page.select_option("#smoothing", "smoothed-9")
    opened.until(f"{lines}.length === 4")
    opened.page.select_option("#smoothing", "")
    opened.until(f"{lines}.length === 2")
    assert opened.complaints == []


def test_the_usual_charts_of_a_machine_are_drawn_when_they_are_unfolded(browser: Browser, tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    (run / "ledger").mkdir()
    line = {"launch": 1, "rank": 0, "time": 110.0, "step": 4, "started": 100.0, "seconds": {"forward": 3.0}}
    lines = [json.dumps({**line, "time": 105.0 + n, "system": {"cpu": 1.0, "waited": 0.5}}) for n in range(3)]
    (run / "ledger" / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    opened = drawn(browser, tw.report(run))
    assert opened.page.locator('[aria-label="Waiting for a core"]').is_visible()
    assert opened.page.locator('[aria-label="Cores used by each process"]').count() == 0
    opened.page.locator("summary", has_text="1 more chart").click()
    opened.page.locator('[aria-label="Cores used by each process"]').first.wait_for(state="visible")
    assert opened.complaints == []


def test_runs_over_each_other_have_a_line_each(browser: Browser, tmp_path: Path) -> None:
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two", 0.5)
    file = tw.compare(one, two, out=tmp_path / "page.html").page
    assert file is not None
    lines = drawn(browser, file).page.locator('#chart-0 [aria-roledescription="line mark"]')
    assert lines.count() == 2


def test_hostile_text_does_not_run(browser: Browser, tmp_path: Path) -> None:
    sample = {"event": "generate", "time": 105.0, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    run = written(
        tmp_path / "run", start(100.0), step(1, 101.0, metrics={HOSTILE: 1.0}), sample, evaluate(1, 102.0, 1.0)
    )
    opened = drawn(browser, tw.report(run))
    assert opened.complaints == [] and opened.page.locator("img").count() == 0
