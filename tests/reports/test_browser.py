"""Pages in a real browser: everything is drawn, and nothing is complained about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import trainwright as tw
from tests.reports.test_reports import HOSTILE, evaluate, finished, start, step, written

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


def opened(page: Path, directory: Path, width: int = 1280) -> tuple[str, list[str]]:
    """The page without its scripts once they have run, and what they have written to the console."""
    assert CHROMIUM is not None
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}", "--enable-logging=stderr")
    command = [
        CHROMIUM,
        *quiet,
        f"--window-size={width},3000",
        "--virtual-time-budget=8000",
        "--dump-dom",
        page.as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    shown = re.sub(r"<script.*?</script>", "", ended.stdout, flags=re.DOTALL)
    return shown, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [600, 1280])
def test_every_chart_of_a_report_is_drawn_within_the_page(tmp_path: Path, width: int) -> None:
    page, console = opened(tw.report(finished(tmp_path / "run")), tmp_path / "browser", width)
    places = re.findall(r'id="chart-(\d+)"', page)
    assert len(places) >= 7 and page.count("<svg") == len(places)
    assert console == []
    widths = [float(found) for found in re.findall(r'<svg[^>]*? width="([\d.]+)"', page)]
    assert widths and max(widths) < width
    assert 'aria-label="Training loss"' in page and 'aria-label="Vega visualization"' not in page


def test_runs_over_each_other_have_a_line_each(tmp_path: Path) -> None:
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two", 0.5)
    file = tw.compare(one, two, out=tmp_path / "page.html").page
    assert file is not None
    page, console = opened(file, tmp_path / "browser")
    assert console == []
    drawn = re.search(r'<div id="chart-0".*?</svg>', page, re.DOTALL)
    assert drawn is not None and len(re.findall(r'aria-roledescription="line mark"', drawn.group())) == 2


def test_hostile_text_does_not_run(tmp_path: Path) -> None:
    sample = {"event": "generate", "time": 105.0, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    run = written(
        tmp_path / "run", start(100.0), step(1, 101.0, metrics={HOSTILE: 1.0}), sample, evaluate(1, 102.0, 1.0)
    )
    page, console = opened(tw.report(run), tmp_path / "browser")
    assert console == [] and "<img" not in page
