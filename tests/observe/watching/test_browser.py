"""The live page in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.observe.watching.test_app import EVALUATE, NAME, SAMPLE, STEP, write, write_ledger
from tests.support.browser import Browser, Scheme, chromium
from tests.support.commands import PATIENCE
from tests.support.runs import ON_ROWS, Runs, events
from trainwright.machine.sharing import lock_directory

pytestmark = pytest.mark.slow
LOSS = '#charts figure[data-key="loss"]'


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
        points = f"Number(document.querySelector('{LOSS} path.line')?.dataset.points ?? 0)"
        page.get_by_label(f"Show the curves of {other.name}", exact=True).uncheck()
        opened.until(f"{points} >= 2")
        before = page.evaluate(points)
        opened.until(f"{points} > {before}")
        assert page.locator("#runs tr", has_text=run.name).locator("td.training").count() == 1

        page.get_by_label(f"Show the curves of {other.name}", exact=True).check()
        opened.until(f"document.querySelectorAll('{LOSS} path.line').length === 2")
        opened.until("document.querySelectorAll('td[data-title=\"optimizer.learning_rate\"]').length === 2")
        rates = page.locator('td[data-title="optimizer.learning_rate"]').all_inner_texts()
        assert sorted(rates) == ["0.001", "0.1"]
        for axis, name in (("tokens", "tokens"), ("seconds", "seconds"), ("flops", "FLOPs"), ("step", "step")):
            page.select_option("#axis", axis)
            page.wait_for_selector(f'svg[aria-label="loss by {name}"]')
        page.locator(f"{LOSS} svg").hover()
        values = f"[...document.querySelectorAll('{LOSS} .values span')].map(each => each.textContent)"
        drawn = page.evaluate(points)
        opened.until(f"{points} > {drawn}")
        assert len(page.evaluate(values)) == 2 and all(page.evaluate(values)), (
            "values where the pointer rests outlast new steps"
        )

        page.get_by_role("link", name=run.name, exact=True).click()
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
        opened.until("document.querySelector('#facts .stopped') !== null")
        opened.until("document.querySelector('#stop').disabled && document.querySelector('#checkpoint').disabled")
        assert (opened.complaints, opened.barriers()) == ([], [])


def test_curves_differences_and_logs_are_shown_only_with_the_token(browser: Browser, tmp_path: Path) -> None:
    run = write(tmp_path / "one", EVALUATE, SAMPLE)
    write(tmp_path / "other", EVALUATE, rate=0.2)
    with watched(tmp_path) as address:
        opened = browser.open(address)
        page = opened.page
        opened.until(f"document.querySelectorAll('{LOSS} path.line').length === 2")
        opened.until("document.querySelectorAll('td.key').length === 2")
        assert page.locator('td[data-title="optimizer.learning_rate"]').all_inner_texts() == ["0.1", "0.2"]
        page.get_by_role("link", name=run.name, exact=True).click()
        opened.until("document.querySelector('#text').textContent === 'line\\n'")
        page.locator("#samples summary").click()
        assert page.locator("#samples details").get_attribute("open") is not None
        shutil.rmtree(run)
        opened.until("document.querySelectorAll('#runs tr').length === 1")
        assert page.locator("#details").is_hidden() and page.locator("#list").is_visible() and opened.complaints == []
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
        opened.until(f"document.querySelectorAll('{LOSS} path.line').length === 3")
        page.fill("#filter", "onerror")
        assert page.locator("#runs tr").count() == 1
        page.fill("#filter", "")
        note = page.locator("#runs .note", has_text="damaged").inner_text()
        assert "1 damaged line left out" in note and "incomplete" in note
        assert (opened.complaints, opened.barriers()) == ([], []) and opened.overflow() <= 0
        if width == 400:
            row = "[...document.querySelectorAll('#runs td')].filter(e => e.getBoundingClientRect().right > innerWidth)"
            assert page.evaluate(f"{row}.length") == 0
        page.locator("#runs td.name a", has_text="script").click()
        page.wait_for_selector("#details:not([hidden])")
        assert page.locator("#title").inner_text() == f"group/{NAME}"
        page.wait_for_selector("#time:not([hidden]) td.share")
        assert (opened.complaints, opened.barriers()) == ([], []) and opened.overflow() <= 0
        assert page.locator("img").count() == 0


def test_the_newest_runs_are_ticked_until_one_is_chosen(browser: Browser, tmp_path: Path) -> None:
    for number in range(6):
        run = write(tmp_path / f"run-{number}", EVALUATE, rate=0.1 + number)
        os.utime(run / "recipe.yaml", (1000 + number, 1000 + number))
    ticked = "[...document.querySelectorAll('#runs tr')].filter(e => e.querySelector('input').checked)"
    names = f"{ticked}.map(e => e.dataset.key).sort().join()"
    rows = "[...document.querySelectorAll('#runs tr')]"
    colors = f"Object.fromEntries({rows}.map(e => [e.dataset.key, e.querySelector('i').style.borderTop]))"
    with watched(tmp_path) as address:
        opened = browser.open(address)
        page = opened.page
        opened.until(f"{names} === 'run-2,run-3,run-4,run-5'")
        before = page.evaluate(colors)
        assert len(set(before.values())) == 6
        page.get_by_label("Show the curves of run-3", exact=True).uncheck()
        page.get_by_label("Show the curves of run-0", exact=True).check()
        write(tmp_path / "run-6")
        opened.until("document.querySelectorAll('#runs tr').length === 7")
        assert page.evaluate(names) == "run-0,run-2,run-4,run-5"
        assert page.evaluate(colors).items() > before.items()
        opened.go(address)
        opened.until(f"{names} === 'run-3,run-4,run-5,run-6'")
        assert page.evaluate(colors).items() > before.items(), "also when the page is loaded again"
        assert opened.complaints == []


def test_a_run_has_an_address_of_its_own_with_all_of_it(browser: Browser, tmp_path: Path) -> None:
    reward = [{**STEP, "time": 20.0 + n, "step": n, "metrics": {"reward": n % 2}} for n in range(4, 9)]
    nothing = {**STEP, "time": 30.0, "step": 9, "loss": "nan"}
    after = [{**STEP, "time": 31.0 + n, "step": n} for n in (10, 11, 20, 21)]
    write(tmp_path / "group" / NAME, EVALUATE, SAMPLE, *reward, nothing, *after)
    write(tmp_path / "other")
    with watched(tmp_path) as address:
        opened = browser.open(f"{address}#{urlencode({'run': f'group/{NAME}'})}", 400)
        page = opened.page
        opened.until("document.querySelectorAll('#charts figure').length >= 5")
        assert page.locator("#list").is_hidden() and page.title() == f"group/{NAME} - Runs"
        assert page.locator("#charts figcaption").all_inner_texts()[:3] == ["loss", "validation loss", "reward"]
        assert page.locator("#evaluations :is(th, td)").all_inner_texts() == ["3", "1.5"]
        assert page.locator(f"{LOSS} path.line").get_attribute("d").count("M") == 3, (
            "a gap where the loss is not a number, and one where steps were lost"
        )
        page.select_option("#smoothing", "0.9")
        opened.until(f"document.querySelectorAll('{LOSS} path.raw').length === 1")
        smoothed = page.locator(f"{LOSS} path.line:not(.raw)").get_attribute("d")
        assert smoothed.count("M") == 3
        reward_lines = page.locator('#charts figure[data-key="reward"] path.line')
        assert reward_lines.nth(0).get_attribute("d") != reward_lines.nth(1).get_attribute("d")
        page.fill("#metric", "rew")
        opened.until("document.querySelectorAll('#charts figure').length === 1")
        page.fill("#tags", "good, <img src=x>")
        page.fill("#note", "<b>note")
        page.get_by_role("button", name="Save").click()
        opened.until("document.querySelector('#answer').textContent === 'saved'")
        assert (opened.complaints, opened.barriers()) == ([], []) and opened.overflow() <= 0
        opened.page.reload()
        opened.until("document.querySelector('#note').value === '<b>note'")
        page.get_by_role("link", name="All runs").click()
        page.fill("#filter", "<img src=x>")
        opened.until("document.querySelectorAll('#runs tr').length === 1")
        page.go_back()
        page.wait_for_selector("#run:not([hidden])")
        assert page.locator("img").count() == 0 and opened.complaints == []


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_what_the_ranks_do_is_on_the_page_of_a_run(browser: Browser, tmp_path: Path, width: int) -> None:
    """A row for each rank while the run trains; the charts are folded unless something shows in them."""
    run = write(tmp_path / "run", EVALUATE)
    write_ledger(run)
    rows = "[...document.querySelectorAll('#use tr')].map(each => each.innerText.split('\\t'))"
    titles = "(id => [...document.querySelectorAll(`#${id} figcaption`)].map(each => each.textContent))"
    drawn = "document.querySelectorAll('#usual path.line').length"
    with watched(tmp_path) as address:
        with lock_directory(run, "locked"):
            opened = browser.open(f"{address}#{urlencode({'run': 'run'})}", width)
            page = opened.page
            opened.until("!document.querySelector('#machine').hidden")
            assert page.evaluate(rows) == [
                [str(rank), f"gpu {use}%", "61/80 GiB", "310 W", "64 °C"] for rank, use in ((0, 90), (1, 95))
            ]
            assert page.locator("#colors li").all_inner_texts() == ["rank 0", "rank 1"]
            assert page.evaluate(f"{titles}('notable')") == ["Waiting for a core (% of the time)"]
            assert page.evaluate(drawn) == 0 and page.locator("#usual").is_hidden()
            page.locator("#folded summary").click()
            opened.until(f"{drawn} > 0")
            folded = page.evaluate(f"{titles}('usual')")
            assert "Use of each GPU (%)" in folded and "Memory of each GPU (GiB)" in folded
            page.locator("#usual figure", has_text="Use of each GPU").locator("svg").hover()
            values = "[...document.querySelectorAll('#usual figure:has(svg[aria-label^=Use]) .values span')]"
            assert page.evaluate(f"{values}.map(each => each.textContent)") == ["90", "95"]
            assert page.locator("#charts .values span").count() == 0, "which have another axis"
            assert (opened.complaints, opened.barriers()) == ([], []) and opened.overflow() <= 0
        finish = {"event": "finish", "time": 20.0, "status": "finished", "step": 3}
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(finish) + "\n")
        opened.until("document.querySelector('#facts .finished') !== null")
        opened.until("document.querySelector('#now').hidden")
        assert page.locator("#machine").is_visible() and page.locator("#folded").get_attribute("open") is not None
