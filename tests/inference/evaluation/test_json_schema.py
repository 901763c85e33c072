"""Answers that should be JSON of a schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import RequestError
from trainwright.inference.evaluation.metrics import JsonSchema

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def of(directory: Path, schema: Any) -> JsonSchema:
    file = directory / "schema.json"
    file.write_text(schema if isinstance(schema, str) else json.dumps(schema))
    return JsonSchema(file)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"name": "Ada"}', 1),
        (' {"name": "Ada", "age": 36}\n', 1),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"age": 36}', 0),
        ('{"name": "Ada", "more": 1}', 0),
        ('Here it is: {"name": "Ada"}', 0),
        ('{"name": "Ada"', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ("", 0),
    ],
)
def test_an_answer_is_one_value_that_the_schema_accepts(tmp_path: Path, answer: str, score: float) -> None:
    assert of(tmp_path, SCHEMA)("whatever", answer) == score


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "should be an object"),
        ({"type": "objekt"}, "not a JSON Schema: at type"),
        ({"properties": {"a": {"minimum": "x"}}}, "at properties/a/minimum"),
    ],
)
def test_a_file_that_is_no_schema_is_refused(tmp_path: Path, schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        of(tmp_path, schema)
    assert str(raised.value).startswith(str(tmp_path / "schema.json"))


def test_a_schema_is_never_fetched(tmp_path: Path) -> None:
    judge = of(tmp_path, {"$ref": "https://example.org/schema.json"})
    with pytest.raises(RequestError, match=r"refers to https://example.org/schema.json, which is not in it"):
        judge("", "1")
