"""Runs that are broken or made to do harm, beside good ones: these are shown as ever, those with a note."""

from __future__ import annotations

import json
import math
import os
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

import trainwright as tw
from tests.support.commands import started, trainwright, wait_for
from trainwright.engine.event_reader import read_log, read_recipe
from trainwright.errors import RequestError
from trainwright.machine.sharing import lock_directory
from trainwright.observe.watching.app import Board

START = {"event": "start", "time": 10.0, "max_steps": 5, "resumed_from": None, "parameters": 7, "world_size": 1}
STEP = {"event": "step", "time": 11.0, "step": 1, "loss": 2.0, "step_time": 1.0, "tokens": 10, "tokens_per_second": 9.0}
EVALUATE = {"event": "evaluate", "time": 15.0, "step": 3, "metrics": {"loss": 1.5}, "seconds": 1.0}
FINISH = {"event": "finish", "time": 16.0, "status": "finished", "step": 3, "seconds": 6.0, "path": "final"}
LEDGER = {"launch": 1, "rank": 0, "time": 20.0, "step": 3, "started": 10.0, "seconds": {"forward": 3.0}}
RECIPE = "task: sft\nmodel: {name: m}\n"
GOOD = [f"good-{number}" for number in range(5)]


def run_of(directory: Path, events: str | bytes | None = None, recipe: str | bytes | None = None) -> Path:
    """Write a run of three steps, or one with other files."""
    (directory / "logs").mkdir(parents=True)
    steps = [{**STEP, "time": 10.0 + n, "step": n, "tokens": 10 * n} for n in (1, 2, 3)]
    lines = "".join(json.dumps(event) + "\n" for event in (START, *steps, EVALUATE, FINISH))
    for name, given, usual in (("events.jsonl", events, lines), ("recipe.yaml", recipe, RECIPE)):
        content = usual if given is None else given
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (directory / "logs" / "rank-0.log").write_text("line\n")
    return directory


def events(*changed: Any) -> Callable[[Path], None]:
    """A run with such lines: events that are changed, text as it is."""
    lines = [line if isinstance(line, str) else json.dumps(line) for line in (START, *changed)]
    return lambda run: run_of(run, "\n".join(lines) + "\n") and None


def recipe(content: str | bytes) -> Callable[[Path], None]:
    return lambda run: run_of(run, recipe=content) and None


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """A run in which something else has the place of a file."""

    def build(run: Path) -> None:
        run_of(run)
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(exist_ok=True)
        make(run / name)

    return build


def with_pipe(name: str, build: Callable[[Path], None]) -> Callable[[Path], None]:
    """A run with a pipe beside its other files."""

    def built(run: Path) -> None:
        build(run)
        os.mkfifo(run / name)

    return built


def links_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def socket_at(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
NOTED: dict[str, Callable[[Path], None]] = {
    "metrics-null": events({**EVALUATE, "metrics": None}),
    "metrics-list": events({**EVALUATE, "metrics": [1]}),
    "metrics-of-lists": events({**EVALUATE, "metrics": {"loss": [1.0]}}),
    "step-nan": events({**STEP, "step": math.nan}),
    "step-digits": events(json.dumps(STEP).replace('"step": 1', f'"step": {"9" * 400}')),
    "step-too-many-digits": events(json.dumps(STEP).replace('"step": 1', f'"step": {"9" * 5000}')),
    "step-negative": events({**STEP, "step": -5}),
    "step-text": events({**STEP, "step": "7"}),
    "step-true": events({**STEP, "step": True}),
    "step-without-loss": events({"event": "step", "time": 1.0, "step": 1, "step_time": 1.0}),
    "loss-list": events({**STEP, "loss": [1]}),
    "loss-digits": events(json.dumps(STEP).replace("2.0", "9" * 400, 1)),
    "step-time-infinite": events({**STEP, "step_time": math.inf}),
    "time-text": events({**STEP, "time": "now"}),
    "time-infinite": events({**STEP, "time": math.inf}),
    "time-far": events({**STEP, "time": 1e300}),
    "max-steps-text": events({**START, "max_steps": "many"}),
    "predicted-text": events({**START, "predicted": {"step_time": "soon", "memory_bytes": "all"}}),
    "versions-list": events({**START, "versions": ["99.1"]}),
    "measured-list": events({**FINISH, "measured": [1]}),
    "operators-text": events({"event": "profile", "time": 1.0, "first": 1, "step": 2, "path": "p", "operators": "x"}),
    "not-a-mapping": events("[1]", '"step"', "null", "1"),
    "kind-list": events({**STEP, "event": ["step"]}),
    "deep": events("[" * 100_000, '{"event":' * 50_000),
    "deep-but-whole": events({**STEP, "more": json.loads("[" * 900 + "]" * 900)}),
    "nul-bytes": lambda run: run_of(run, b"\0" * 5000 + b"\n") and None,
    "line-without-end": instead("events.jsonl", sparse),
    "events-pipe": instead("events.jsonl", os.mkfifo),
    "events-directory": instead("events.jsonl", os.mkdir),
    "events-socket": instead("events.jsonl", socket_at),
    "events-endless": instead("events.jsonl", links_to("/dev/zero")),
    "events-loop": instead("events.jsonl", links_to("events.jsonl")),
    "events-elsewhere": instead("events.jsonl", links_to("/etc/passwd")),
    "recipe-pipe": instead("recipe.yaml", os.mkfifo),
    "recipe-endless": instead("recipe.yaml", links_to("/dev/zero")),
    "recipe-elsewhere": instead("recipe.yaml", links_to("/etc/passwd")),
    "recipe-directory": instead("recipe.yaml", os.mkdir),
    "recipe-huge": instead("recipe.yaml", sparse),
    "recipe-list": recipe("- task: sft\n"),
    "recipe-empty": recipe(""),
    "recipe-aliases": recipe(ALIASES),
    "recipe-circle": recipe("a: &a [*a]\n"),
    "recipe-deep": recipe("a: " + "[" * 20_000),
    "recipe-many": recipe("a: [" + "1," * 100_000 + "]"),
    "recipe-not-utf-8": recipe(b"task: \xff\xfe\n"),
    "recipe-nul": recipe(b"task: sft\0\n"),
    "recipe-tag": recipe("task: !!python/object/apply:os.system [id]\n"),
    "lock-pipe": with_pipe(".lock", events("[]")),
    "<b>bold\n$(id)\x1b[31m; rm -rf '*' \u202e": events("{}"),
}
# What is wrong with these is not shown, or nothing is.
UNNOTED: dict[str, Callable[[Path], None]] = {
    "no-events": instead("events.jsonl", lambda path: None),
    "empty-events": lambda run: run_of(run, b"") and None,
    "model-text": recipe("task: sft\nmodel: gpt2\n"),
    "model-list": recipe("task: [sft]\nmodel: [gpt2]\ndata: none\n"),
    "model-of-lists": recipe("task: {a: b}\nmodel: {name: [1], config: [2]}\n"),
    "log-pipe": instead("logs/rank-0.log", os.mkfifo),
    "log-elsewhere": instead("logs/rank-0.log", links_to("/etc/passwd")),
    "log-endless": instead("logs/rank-0.log", links_to("/dev/zero")),
    "ledger-pipe": instead("ledger/rank-0.jsonl", os.mkfifo),
    "ledger-elsewhere": instead("ledger", links_to("/var")),
    "ledger-numbers": instead(
        "ledger/rank-0.jsonl",
        lambda path: path.write_text(
            "".join(
                json.dumps(LEDGER).replace("3.0", text).replace('"step": 3', f'"step": {text}') + "\n"
                for text in ("NaN", "Infinity", "9" * 400, "9" * 5000, "[" * 5000, '"x"')
            )
        ),
    ),
    "ledger-samples": instead(
        "ledger/rank-0.jsonl",
        lambda path: path.write_text(
            json.dumps({**LEDGER, "system": {"cpu": 10**400, "disk": math.nan, "gpu": {"limited": 3}}}) + "\n"
        ),
    ),
    "plan-list": instead(
        "plan.json", lambda path: path.write_text('{"chosen": {"memory": [1], "time": {"parts": 1}}}')
    ),
    "plan-numbers": instead(
        "plan.json",
        lambda path: path.write_text(f'{{"chosen": {{"time": {{"parts": {{"a": {"9" * 400}, "b": "c"}}}}}}}}'),
    ),
    "remarks-pipe": instead("remarks.json", os.mkfifo),
    "remarks-elsewhere": instead("remarks.json", links_to("/etc/passwd")),
    "remarks-wrong": instead("remarks.json", lambda path: path.write_text('{"tags": {"a": 1}, "note": [2]}')),
    "remarks-deep": instead("remarks.json", lambda path: path.write_text("[" * 100_000)),
    "metrics-many": events(*[{**STEP, "step": n, "metrics": {f"{n}{'x' * n}": 1.0}} for n in range(1, 400)]),
    "plan-pipe": instead("plan.json", os.mkfifo),
    "plan-deep": instead("plan.json", lambda path: path.write_text("[" * 100_000)),
    "far": events({**START, "max_steps": 2**52}, {**STEP, "step_time": 9e8}),
    "many-starts": events(*[json.dumps(START)] * 30_000),
    "a-circle": instead("inside", links_to("..")),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hostile") / "runs"
    for name in GOOD:
        run_of(found / name)
    for name, build in {**NOTED, **UNNOTED}.items():
        build(found / name)
    return found


@pytest.mark.timeout(120)
def test_good_runs_are_listed_beside_hostile_ones_as_without_them(root: Path, tmp_path: Path) -> None:
    begun = time.process_time()
    found = {each.run.name: each for each in tw.runs(root)}
    assert time.process_time() - begun < 3.0  # two thirds of a second on a desktop
    assert found.keys() == {*GOOD, *NOTED, *UNNOTED}
    for name in GOOD:
        each = found[name]
        assert (each.status, each.step, each.steps, each.best, each.model) == ("finished", 3, 5, 1.5, "m")
    assert {name for name, each in found.items() if each.notes} == set(NOTED)
    assert not [each.notes for each in found.values() if each.status == "unknown"]
    assert (found["model-text"].model, found["step-digits"].step) == ("", 0)
    done = trainwright("runs", str(root), cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert sum("finished" in line and "good-" in line for line in done.stdout.splitlines()) == len(GOOD)
    assert f"note: {root}/events-pipe: events.jsonl: is a named pipe, not a file" in done.stdout
    assert "\x1b" not in done.stdout and "\u202e" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_live_page_follows_good_runs_beside_hostile_ones(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with started("-m", "trainwright", "watch", str(root), cwd=tmp_path, output=output):
        address = wait_for(lambda: next((word for word in output.read_text().split() if "http://" in word), ""))
        page = urlsplit(address)

        def ask(path: str, **query: str) -> Any:
            with urllib.request.urlopen(
                f"http://{page.netloc}{path}?{page.query}&{urlencode(query)}", timeout=30
            ) as got:
                return json.load(got)

        def rows_of_all() -> Any:
            found = ask("/runs")
            whole = len(found) == len([*GOOD, *NOTED, *UNNOTED]) and "to be read" not in json.dumps(found)
            return whole and found

        rows = wait_for(rows_of_all)
        for name in GOOD:
            row = rows[name]
            assert (row["status"], row["step"], row["best"], row["note"]) == ("finished", 3, 1.5, "")
            assert ask("/curves", run=name)[name]["loss"][:2] == [[1, 2, 3], [2, 2, 2]]
        assert {name for name, row in rows.items() if row["note"]} == set(NOTED)
        for name in rows:
            ask("/seconds", run=name)
            ask("/curves", run=name, axis="flops")
            logs = ask("/details", run=name)["logs"]
            assert logs == ([] if name.startswith("log-") else ["rank-0.log"])
        # It goes on following.
        run_of(root / "late")
        wait_for(lambda: ask("/runs").get("late", {}).get("status") == "finished")
        assert ask("/log", run="late", file="rank-0.log") == "line\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask("/log", run="log-elsewhere", file="rank-0.log")


@pytest.mark.timeout(120)
def test_good_runs_are_compared_beside_hostile_ones(root: Path, tmp_path: Path) -> None:
    names = [*GOOD, *NOTED, *UNNOTED]
    found = tw.compare([root / name for name in names], out=tmp_path / "page.html")
    text = str(found).splitlines()
    assert next(line for line in text if line.startswith("good-0")).split()[:4] == ["good-0", "finished", "3", "2.0000"]
    assert {each.metric for each in found.evaluations if each.run in GOOD} == {"loss"}
    for name in NOTED:
        assert any(note.startswith(f"{name}: ") for note in found.notes), name
    assert "good-0" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_report_of_a_hostile_run_has_a_note(root: Path, tmp_path: Path) -> None:
    noted = set()
    for name in [*GOOD, *NOTED, *UNNOTED]:
        page = tw.report(root / name, tmp_path / "page.html").read_text()
        noted |= {name} if "shown without it" in page else set()
    assert noted == set(NOTED)


@pytest.mark.timeout(120)
def test_what_else_reads_runs_reads_hostile_ones(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    with lock_directory(Path("runs/step-text"), "locked"), lock_directory(Path("runs/far"), "locked"):
        found = {each.run.name: each for each in tw.jobs()}
        assert all(each.columns() for each in found.values())
    assert found.keys() >= {*GOOD, *NOTED, *UNNOTED}
    assert {found[name].state for name in GOOD} == {"finished"} and found["far"].state == "training"
    for name in {*NOTED, *UNNOTED} - {name for name in NOTED if name.startswith("recipe-")}:
        run = tw.Run(Path("runs") / name)
        assert run.status in ("finished", "unfinished") and isinstance(run.plan, dict)
        if name.startswith("log-"):
            with pytest.raises(RequestError, match="there are no logs"):
                tw.explain(run)
        else:
            assert tw.explain(run).cause is None


def test_numbers_that_a_run_writes_itself_stay_readable(tmp_path: Path) -> None:
    """A loss that is not finite is no damage."""
    lines = [
        {**STEP, "loss": "nan", "grad_norm": "inf", "metrics": {"z": "-inf"}},
        {**EVALUATE, "metrics": {"loss": "nan", "perplexity": 1.7e308}},
        {**FINISH, "measured": {"step_time": "nan"}},
        {"event": "generate", "time": 1.0, "step": 1, "prompt": "nan", "text": "9" * 400},
        {"event": "mine", "time": 1.0, "step": 1, "anything": ["at", {"all": None}]},
    ]
    events(*lines)(tmp_path / "run")
    log = read_log(tmp_path / "run" / "events.jsonl")
    assert not log.damage and len(log.history) == 6
    step, evaluate, finish, generate = log.history[1:5]
    assert math.isnan(step["loss"]) and step["grad_norm"] == math.inf and step["metrics"] == {"z": -math.inf}
    assert math.isnan(evaluate["metrics"]["loss"]) and math.isnan(finish["measured"]["step_time"])
    assert (generate["prompt"], generate["text"]) == ("nan", "9" * 400)
    tw.report(tmp_path / "run")
    board = Board(tmp_path)
    board.look()
    assert board.rows()["run"]["note"] == ""


def test_a_run_directory_that_is_a_link_is_listed_once(tmp_path: Path) -> None:
    run_of(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "again").symlink_to("one")
    (tmp_path / "runs" / "elsewhere").symlink_to("..")
    assert [each.run.name for each in tw.runs(tmp_path / "runs")] == ["one"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "here").symlink_to("../runs/one")
    assert [each.status for each in tw.runs(tmp_path / "links")] == ["finished"]
    assert read_recipe(tmp_path / "links" / "here") == {"task": "sft", "model": {"name": "m"}}


@pytest.mark.timeout(60)
def test_what_asks_a_run_to_stop_writes_nowhere_else(tmp_path: Path) -> None:
    for name, make in (("link", links_to("../elsewhere")), ("pipe", os.mkfifo)):
        make(run_of(tmp_path / name) / "stop")
        with lock_directory(tmp_path / name, "locked"), pytest.raises(RequestError, match="cannot be written"):
            tw.stop(tmp_path / name, timeout=0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_look_reads_only_some_of_many_large_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        run_of(tmp_path / f"run-{number}")
    monkeypatch.setattr("trainwright.observe.watching.app._LOOK_SECONDS", 0.0)  # no time for recipes
    board = Board(tmp_path)
    board.look()
    assert {(row["step"], row["model"], row["note"]) for row in board.rows().values()} == {
        (3, "", "recipe.yaml is still to be read")
    }
    monkeypatch.setattr("trainwright.observe.watching.app._LOOK_SECONDS", 60.0)
    board.look()
    assert {(row["step"], row["model"], row["note"]) for row in board.rows().values()} == {(3, "m", "")}
