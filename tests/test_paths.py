"""A path of a user that does not exist is refused by every command that takes a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import trainwright
from tests.support.runs import TINY
from trainwright.errors import RequestError
from trainwright.paths import user_path


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/rows.jsonl") == tmp_path / "rows.jsonl"
    assert user_path("rows~.jsonl") == Path("rows~.jsonl")


def test_an_unknown_user_is_named() -> None:
    with pytest.raises(RequestError, match=r"^~nosuchuser/rows.jsonl: there is no user nosuchuser; write the whole"):
        user_path("~nosuchuser/rows.jsonl")


@pytest.mark.parametrize(
    "words",
    [
        ("train", str(TINY), "data.train=~nosuchuser/rows.jsonl"),
        ("train", str(TINY), "logging.run_directory=~nosuchuser/run"),
        ("train", "--resume", "~nosuchuser/run"),
        ("recipe", "check", str(TINY), "model.name=~nosuchuser/model", "model.config=null"),
        ("data", "check", str(TINY), "data.train=~nosuchuser/rows.jsonl"),
        ("generate", "~nosuchuser/model", "--prompt", "x"),
        ("plan", "--model", "~nosuchuser/model"),
        ("merge", "~nosuchuser/run", "--out", "merged"),
    ],
)
def test_commands_end_with_2(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = trainwright(*words, cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert "nosuchuser" in ended.stderr and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
