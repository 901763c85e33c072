"""What is being done while nothing else is shown."""

from __future__ import annotations

import io
import time
import types
from pathlib import Path

import pytest

from tests.support.commands import wait_for
from tests.support.runs import TINY
from trainwright.engine.task import import_task_module
from trainwright.models.load import load_model
from trainwright.recipe.loading import load_recipe
from trainwright.utils.activity import Activity, Ticker, begin_activity, format_log_line, report_progress
from trainwright.utils.text import say

pytestmark = pytest.mark.usefixtures("told_of")
RESOLVED = ("parallel.strategy=single", "parallel.num_processes=1")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_line_of_what_takes_long() -> None:
    stream = io.StringIO()
    with Activity(stream, "importing", quiet_seconds=0.2) as activity:
        begin_activity("reading rows.jsonl \x1b[2J")
        wait_for(lambda: "reading" in stream.getvalue())
        activity.say("a remark")
        begin_activity("")
    begin_activity("nobody shows this")
    told = stream.getvalue().removeprefix("importing …\n")  # where even that took long
    assert told == "reading rows.jsonl \\x1b[2J …\na remark\n"


def test_a_terminal_shows_the_seconds_and_is_clean_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    stream = _Terminal()
    with Activity(stream, "loading the weights of a model", quiet_seconds=0.1):
        wait_for(lambda: "loading" in stream.getvalue())
    assert "\r\x1b[Kloading the  … 0:0" in stream.getvalue()  # cut to the width, but for the seconds
    assert stream.getvalue().endswith("\r\x1b[K") and "\n" not in stream.getvalue()


def test_a_terminal_shows_an_activity_sooner_than_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("trainwright.utils.activity.QUIET_SECONDS", 3600.0)
    terminal, log = _Terminal(), io.StringIO()
    with Activity(log, "importing"):
        time.sleep(0.3)
    with Activity(terminal, "importing"):
        wait_for(lambda: "importing" in terminal.getvalue())
    assert not log.getvalue()


def test_an_inner_activity_replaces_the_outer_one_for_a_while() -> None:
    stream = io.StringIO()
    with Activity(stream, "outer", quiet_seconds=0.0):
        wait_for(lambda: "outer" in stream.getvalue())
        with Activity(stream, "inner", quiet_seconds=0.0):
            wait_for(lambda: "inner" in stream.getvalue())
        wait_for(lambda: stream.getvalue().count("outer") == 2)
    assert stream.getvalue() == "outer …\ninner …\nouter …\n"


def test_the_start_is_over_with_the_first_output_or_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    with Activity(stream, "starting", quiet_seconds=0.0, until_output=True):
        wait_for(lambda: "starting" in stream.getvalue())
        say("the plan", file=stream)
        written = stream.getvalue()
        assert written.endswith("\r\x1b[Kthe plan\n")
        time.sleep(1.2)  # it is drawn every second
        assert stream.getvalue() == written
    stream = _Terminal()
    with Activity(stream, "starting", quiet_seconds=0.0, until_output=True) as start:
        with Activity(stream, "importing", quiet_seconds=600):
            pass
        assert start._ticker is None  # and no thread is left, so that processes can be forked


def test_a_log_hears_of_a_long_activity_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, bool]] = []
    clock = iter([0.0, *(float(second) for second in range(2, 200))])
    monkeypatch.setattr("trainwright.utils.activity.time", types.SimpleNamespace(monotonic=lambda: next(clock, 1e9)))
    ticker = Ticker(lambda seconds, for_log: seen.append((seconds, for_log)))
    ticker.begin(2.0)
    wait_for(lambda: len(seen) >= 150)
    ticker.close()
    assert [seconds for seconds, for_log in seen if for_log and seconds < 200] == [2.0, 30.0, 60.0, 120.0]
    assert format_log_line("compiling", 2.0) == "compiling …"
    assert format_log_line("compiling", 90.0, ", 40%") == "compiling … 1:30, 40%"


def test_a_fraction_is_shown_beside_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    with Activity(stream, "tokenizing", quiet_seconds=0.0):
        report_progress(3, 4)
        wait_for(lambda: ", 75%" in stream.getvalue())
        begin_activity("writing")
        wait_for(lambda: "writing" in stream.getvalue())
    assert "writing … 0:00, " not in stream.getvalue()


def test_what_is_quick_or_has_no_stream_is_not_mentioned() -> None:
    stream = io.StringIO()
    with Activity(stream, "importing", quiet_seconds=600):
        begin_activity("planning")
    with Activity(None, "importing"):
        begin_activity("planning")
    assert not stream.getvalue()


def test_nothing_is_said_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_QUIET", "1")
    stream = io.StringIO()
    with Activity(stream, "importing", quiet_seconds=0.0) as activity:
        assert activity._ticker is not None and activity._ticker._thread is None
    assert not stream.getvalue()


def test_an_error_ends_it() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError), Activity(stream, "importing", quiet_seconds=600):
        raise ValueError
    begin_activity("planning")
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
        import_task_module(recipe).prepare_once(recipe, tmp_path / "cache")
        load_model(recipe.model)
        import_task_module(recipe).prepare_once(recipe, tmp_path / "cache")  # in the cache now
    assert heard.what == ["reading and tokenizing the rows", "initializing the model"]
