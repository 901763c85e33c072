"""What is being done while nothing else is shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.support.commands import wait_for
from tests.support.runs import TINY
from trainwright.activity import Activity, doing
from trainwright.models.load import load_model
from trainwright.recipe.loading import load_recipe
from trainwright.tasks.registry import task_module

pytestmark = pytest.mark.usefixtures("told_of")
RESOLVED = ("parallel.strategy=single", "parallel.num_processes=1")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_line_of_what_takes_long() -> None:
    stream = io.StringIO()
    with Activity(stream, "importing", quiet_seconds=0.2) as activity:
        doing("reading rows.jsonl \x1b[2J")
        wait_for(lambda: "reading" in stream.getvalue())
        activity.say("a remark")
        doing("")
    doing("nobody shows this")
    told = stream.getvalue().removeprefix("importing …\n")  # where even that took long
    assert told == "reading rows.jsonl \\x1b[2J …\na remark\n"


def test_a_terminal_shows_the_seconds_and_is_clean_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    stream = _Terminal()
    with Activity(stream, "loading the weights of a model", quiet_seconds=0.1):
        wait_for(lambda: "loading" in stream.getvalue())
    assert "\r\x1b[Kloading the weights" in stream.getvalue()  # cut to the width
    assert stream.getvalue().endswith("\r\x1b[K") and "\n" not in stream.getvalue()


def test_what_is_quick_or_has_no_stream_is_not_mentioned() -> None:
    stream = io.StringIO()
    with Activity(stream, "importing", quiet_seconds=600):
        doing("planning")
    with Activity(None, "importing"):
        doing("planning")
    assert not stream.getvalue()


def test_nothing_is_said_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_QUIET", "1")
    stream = io.StringIO()
    with Activity(stream, "importing", quiet_seconds=0.0) as activity:
        assert activity._ticker is not None
        activity._ticker._thread.join(60)
    assert not stream.getvalue()


def test_an_error_ends_it() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError), Activity(stream, "importing", quiet_seconds=600):
        raise ValueError
    doing("planning")
    assert not stream.getvalue()


class _Heard(Activity):
    def __init__(self) -> None:
        super().__init__(None)
        self.what: list[str] = []

    def begin(self, what: str) -> None:
        self.what.append(what)


def test_reading_data_and_loading_models_say_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Why?", "answer": "So."}\n' * 3)
    recipe = load_recipe(TINY, [f"data.train={tmp_path / 'rows.jsonl'}", "data.validation=null", *RESOLVED])
    with _Heard() as heard:
        task_module(recipe).prepare_once(recipe, tmp_path / "cache")
        load_model(recipe.model)
        task_module(recipe).prepare_once(recipe, tmp_path / "cache")  # in the cache now
    assert heard.what == ["reading and tokenizing the rows", "initializing the model"]
