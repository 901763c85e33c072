"""The live page in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import Browser, Scheme, chromium
from tests.support.commands import PATIENCE
from tests.support.runs import ON_ROWS, Runs, events
from tests.watching.test_app import EVALUATE, NAME, SAMPLE, write, write_ledger

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


def test_a_run_of_two_processes_is_followed_saved_and_stopped(browser: Browser, runs: Runs) -> None:
    few = (ON_ROWS, "parallel.num_processes=2", "parallel.strategy=ddp", "data.validation=4", "train.max_steps=100000")
    asked = (
        "checkpoint.every=null",
        "checkpoint.keep_best=false",
        "evaluate.every=5",
        "evaluate.prompts=[Hello]",
        "evaluate.max_new_tokens=4",
    )
    started = runs.train(*few, *asked)
    run = started.run
    assert run is not None
    other = write(run.parent / "other", EVALUATE, {"event": "finish", "time": 15.0, "status": "finished", "step": 3})
    with watched(run.parent) as address:
        opened = browser.open(address)
        page = opened.page
        page.get_by_label(f"Show the curves of {run.name}", exact=True).check()
        points = "Number(document.querySelector('#chart polyline')?.dataset.points ?? 0)"
        opened.until(f"{points} >= 2")
        before = page.evaluate(points)
        opened.until(f"{points} > {before}")
        assert page.locator("#runs tr", has_text=run.name).locator("td.training").count() == 1

        page.get_by_label(f"Show the curves of {other.name}", exact=True).check()
        opened.until("document.querySelectorAll('#chart polyline').length === 2")
        opened.until("document.querySelectorAll('#values tr').length > 0")
        rate = page.locator("#values tr", has_text="optimizer.learning_rate").locator("td").all_inner_texts()
        assert rate == ["optimizer.learning_rate", "0.001", "0.1"]
        for axis, name in (("tokens", "tokens"), ("seconds", "seconds"), ("flops", "FLOPs"), ("step", "step")):
            page.select_option("#axis", axis)
            page.wait_for_selector(f'svg[aria-label="loss by {name}"]')
        page.locator("#chart svg").hover()
        values = "[...document.querySelectorAll('#legend b')].map(each => each.textContent)"
        drawn = page.evaluate(points)
        opened.until(f"{points} > {drawn}")
        assert all(page.evaluate(values)), "values where the pointer rests outlast new steps"

        page.get_by_role("button", name=run.name, exact=True).click()
        sample = page.locator("#samples details").last
        sample.locator("summary").click()
        assert "Hello" in sample.inner_text()
        page.select_option("#file", "rank-1.log")
        opened.until("document.querySelector('#seconds th') !== null && !document.querySelector('#time').hidden")
        assert page.locator("#ranks th").all_inner_texts() == ["Seconds", "Rank 0", "Rank 1"]

        page.get_by_role("button", name="Checkpoint now").click()
        shown = (
            "[...document.querySelectorAll('#events li')].some(each => each.textContent.includes('checkpoint · step'))"
        )
        opened.until(shown)
        assert len(events(run, "checkpoint")) == 1
        assert sample.get_attribute("open") is not None, "what is open stays open as the run goes on"
        assert page.locator("#file").input_value() == "rank-1.log"

        page.get_by_role("button", name="Stop after this step").click()
        assert started.wait().code == 75
        opened.until("document.querySelector('#runs td.stopped') !== null")
        opened.until("document.querySelector('#stop').disabled && document.querySelector('#checkpoint').disabled")
        assert (opened.complaints, opened.barriers()) == ([], [])


def test_curves_differences_and_logs_are_shown_only_with_the_token(browser: Browser, tmp_path: Path) -> None:
    run, other = write(tmp_path / "one", EVALUATE, SAMPLE), write(tmp_path / "other", EVALUATE, rate=0.2)
    with watched(tmp_path) as address:
        opened = browser.open(address)
        page = opened.page
        for each in (run, other):
            page.get_by_label(f"Show the curves of {each.name}", exact=True).check()
        opened.until("document.querySelectorAll('#chart polyline').length === 2")
        opened.until("document.querySelectorAll('#values tr').length === 1")
        assert page.locator("#values td").all_inner_texts() == ["optimizer.learning_rate", "0.1", "0.2"]
        page.get_by_role("button", name=run.name, exact=True).click()
        opened.until("document.querySelector('#text').textContent === 'line\\n'")
        page.locator("#samples summary").click()
        assert page.locator("#samples details").get_attribute("open") is not None
        shutil.rmtree(run)
        opened.until("document.querySelectorAll('#runs tr').length === 1")
        assert page.locator("#details").is_hidden() and opened.complaints == []
        assert all(each.startswith(address.partition("?")[0]) or each == "data:," for each in opened.requests)
        stranger = browser.open()
        assert stranger.page.goto(address.partition("?")[0]).status == 403


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_hostile_names_fit_and_do_not_run(browser: Browser, tmp_path: Path, width: int, scheme: Scheme) -> None:
    write_ledger(write(tmp_path / "group" / NAME, EVALUATE, SAMPLE))
    write(tmp_path / ("<img src=x onerror=alert(1)>" + "x" * 150), EVALUATE, rate=0.2)
    write(tmp_path / "\u05e9\u05dc\u05d5\u05dd", EVALUATE)
    with (tmp_path / "group" / NAME / "events.jsonl").open("a") as file:
        file.write('damaged\n{"event": "st')
    with watched(tmp_path) as address:
        opened = browser.open(address, width, scheme=scheme)
        page = opened.page
        opened.until("document.querySelectorAll('#runs tr').length === 3")
        for box in page.locator("#runs input").all():
            box.check()
        opened.until("document.querySelectorAll('#chart polyline').length === 3")
        page.locator("#runs td.name button", has_text="script").click()
        page.wait_for_selector("#details:not([hidden])")
        assert page.locator("#title").inner_text() == f"group/{NAME}"
        page.wait_for_selector("#time:not([hidden]) td.share")
        note = page.locator("#runs .note", has_text="damaged").inner_text()
        assert "1 damaged line left out" in note and "incomplete" in note
        page.fill("#filter", "onerror")
        assert page.locator("#runs tr").count() == 1
        assert (opened.complaints, opened.barriers()) == ([], []) and opened.overflow() <= 0
        assert page.locator("img").count() == 0
