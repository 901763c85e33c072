"""What the first rows of the data say before anything is launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.check import check_data
from trainwright.errors import RequestError
from trainwright.recipe.schema import RecipeSchema

ROW = {"question": "What is it?", "answer": "It is this."}
TEXT = {"text": "As it is."}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str, *rows: Any) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def recipe(data: dict[str, Any], **model: Any) -> RecipeSchema:
    return RecipeSchema.model_validate({"task": "sft", "model": {"name": "some/model", **model}, "data": data})


def test_sound_data_passes() -> None:
    check_data(recipe({"train": written("a.jsonl", *[ROW] * 30)}))
    check_data(
        recipe({"train": "a.jsonl", "validation": written("b.jsonl", {"messages": CHAT})}, chat_template="{{ x }}")
    )
    check_data(recipe({"train": "pydoc", "format": "question_answer"}))
    check_data(recipe({"train": "some-org/some-data", "format": "text"}, chat_template="{{ x }}"))
    # Rows with nothing to train on are left out later.
    check_data(recipe({"train": written("c.jsonl", {**ROW, "answer": ""}, ROW)}))


@pytest.mark.parametrize(
    ("data", "rows", "message"),
    [
        ({}, [{"color": "red", "size": 3}], r"data\.train: a\.jsonl: the rows have the fields color, size"),
        ({"format": "messages"}, [ROW], r"data\.train: a\.jsonl: data\.format messages needs the field messages"),
        ({"train": "pydoc", "format": "text"}, [], r"data\.train: pydoc: data\.format text needs the field text"),
        ({}, [ROW, {"question": "Q", "id": 1}], r"data\.train: a\.jsonl:2: the field answer is missing"),
        ({}, [{"messages": CHAT}, {"messages": "Hi"}], r"data\.train: a\.jsonl:2: the field messages should be a list"),
        ({"validation": "b.jsonl"}, [ROW], r"data\.validation: no file b\.jsonl"),
        ({"validation": "other.jsonl"}, [ROW], r"data\.validation: other\.jsonl: the rows have the fields x"),
    ],
)
def test_rows_that_cannot_be_trained_on(data: dict[str, Any], rows: list[Any], message: str) -> None:
    written("a.jsonl", *rows)
    written("other.jsonl", {"x": 1})
    with pytest.raises(RequestError, match=f"^{message}"):
        check_data(recipe({"train": "a.jsonl", **data}))


def test_rows_beyond_the_limit_are_not_asked_for() -> None:
    written("a.jsonl", ROW, {"question": "Q"})
    check_data(recipe({"train": "a.jsonl", "limit": 1, "validation": None}))


@pytest.mark.parametrize("data", [{"format": "auto"}, {"format": "text", "validation": "b.jsonl"}])
def test_a_chat_template_for_plain_text_is_refused(data: dict[str, Any]) -> None:
    written("a.jsonl", TEXT)
    written("b.jsonl", TEXT)
    with pytest.raises(RequestError, match=r"^model\.chat_template: has no effect on rows of plain text"):
        check_data(recipe({"train": "a.jsonl", **data}, chat_template="{{ messages }}"))
    check_data(recipe({"train": "a.jsonl", **data}))


def test_looking_imports_nothing_heavy() -> None:
    written("a.jsonl", ROW)
    code = (
        "import sys; from trainwright.data.check import check_data\n"
        "from trainwright.recipe.schema import RecipeSchema\n"
        "values = {'task': 'sft', 'model': {'name': 'a/b'}, 'data': {'train': 'a.jsonl'}}\n"
        "check_data(RecipeSchema.model_validate(values))\n"
        "assert not {'torch', 'datasets', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
