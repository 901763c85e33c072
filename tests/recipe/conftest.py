from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe

SMALLEST = "task: sft\nmodel: {name: some/model}\ndata: {train: pydoc}\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a recipe into an empty directory, which becomes the current one; gives its relative path."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.yaml") -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def refusal(write: Callable[..., Path]) -> Callable[..., list[str]]:
    """The lines of the message with which a recipe (the smallest one and ``text``) is refused."""

    def lines(text: str = "", *overrides: str, start: str = SMALLEST) -> list[str]:
        path = write(start + textwrap.dedent(text))
        with pytest.raises(RequestError) as caught:
            load_recipe(path, overrides)
        assert caught.value.exit_code == 2
        return str(caught.value).splitlines()

    return lines
