"""The live page in a real browser, with a run of two processes that it follows, saves and stops."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import Browser, Scheme, chromium
from tests.support.commands import PATIENCE, wait_for
from tests.support.runs import ON_ROWS, Runs, events
from tests.watching.test_app import EVALUATE, NAME, SAMPLE, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def watched(root: Path) -> Iterator[str]:
    """Start `trainwright watch`; the address that it prints."""
    command = [sys.executable, "-m", "trainwright", "watch", str(root)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield next(line.split()[-1] for line in process.stderr if "http://127.0.0.1" in line)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_a_run_is_followed_saved_and_stopped(browser: Browser, runs: Runs, tmp_path: Path) -> None:
    few = (ON_ROWS, "parallel.num_processes=2", "train.max_steps=100000", "checkpoint.every=null", "evaluate.every=5")
    started = runs.train(*few, "evaluate.prompts=[Hello]", "evaluate.max_new_tokens=4", "data.validation=4")
    assert started.run is not None
    run = started.run
    other = write(run.parent / "other", EVALUATE, SAMPLE)
    with watched(run.parent) as address:
        opened = browser.open(address)
        page = opened.page
        page.get_by_label(f"Show the curves of {run.name}", exact=True).check()
        line = page.locator("#chart polyline").first
        page.wait_for_function("Number(document.querySelector('#chart polyline')?.dataset.points) >= 2")
        before = int(line.get_attribute("data-points"))
        page.wait_for_function(f"Number(document.querySelector('#chart polyline').dataset.points) > {before}")
        assert page.locator("#runs tr", has_text=run.name).locator("td.training").count() == 1

        page.get_by_label(f"Show the curves of {other.name}", exact=True).check()
        page.wait_for_function("document.querySelectorAll('#chart polyline').length === 2")
        rate = page.locator("#values tr", has_text="optimizer.learning_rate").locator("td").all_inner_texts()
        assert rate[0] == "optimizer.learning_rate" and "0.1" in rate[1:]
        for axis in ("tokens", "seconds", "flops"):
            page.select_option("#axis", axis)
            page.wait_for_selector(f'svg[aria-label="loss by {"FLOPs" if axis == "flops" else axis}"]')
        page.locator("#chart svg").hover()
        page.wait_for_function("[...document.querySelectorAll('#legend b')].every(each => each.textContent)")

        page.get_by_role("button", name=run.name, exact=True).click()
        sample = page.locator("#samples details").first
        sample.locator("summary").click()
        assert "Hello" in sample.inner_text() and sample.get_attribute("open") is not None
        page.select_option("#file", "rank-1.log")
        page.wait_for_function("document.querySelector('#text').textContent.length > 0")
        assert page.locator("#text").inner_text().strip() in (run / "logs" / "rank-1.log").read_text()

        page.get_by_role("button", name="Checkpoint now").click()
        wait_for(lambda: events(run, "checkpoint"))
        page.get_by_role("button", name="Stop after this step").click()
        assert started.wait().code == 75
        page.wait_for_function("document.querySelector('#runs td.stopped') !== null")
        assert page.locator("#stop").is_disabled() and opened.barriers() == []

        shutil.rmtree(run)
        page.wait_for_function("document.querySelectorAll('#runs tr').length === 1")
        assert page.locator("#details").is_hidden()
        assert opened.complaints == []
        assert all(each.startswith(address.partition("?")[0]) or each == "data:," for each in opened.requests)

        stranger = browser.open()
        assert stranger.page.goto(address.partition("?")[0]).status == 403


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_hostile_names_fit_and_do_not_run(browser: Browser, tmp_path: Path, width: int, scheme: Scheme) -> None:
    write(tmp_path / "group" / NAME, EVALUATE, SAMPLE)
    write(tmp_path / ("<img src=x onerror=alert(1)>" + "x" * 150), EVALUATE, rate=0.2)
    write(tmp_path / "\u05e9\u05dc\u05d5\u05dd", EVALUATE)
    with (tmp_path / "group" / NAME / "events.jsonl").open("a") as file:
        file.write('damaged\n{"event": "st')
    with watched(tmp_path) as address:
        opened = browser.open(address, width, scheme=scheme)
        page = opened.page
        page.wait_for_function("document.querySelectorAll('#runs tr').length === 3")
        for box in page.locator("#runs input").all():
            box.check()
        page.wait_for_function("document.querySelectorAll('#chart polyline').length === 3")
        page.locator("#runs td.name button", has_text="script").click()
        page.wait_for_selector("#details:not([hidden])")
        assert page.locator("#title").inner_text() == f"group/{NAME}"
        note = page.locator("#runs td.note", has_text="damaged").inner_text()
        assert "1 damaged line left out" in note and "incomplete" in note
        page.fill("#filter", "onerror")
        assert page.locator("#runs tr").count() == 1
        assert (opened.complaints, opened.barriers()) == ([], []) and opened.overflow() <= 0
        assert page.locator("img").count() == 0
