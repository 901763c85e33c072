"""Conformance of answers to a JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainwright.errors import RequestError
from trainwright.evaluation.libraries import require
from trainwright.paths import user_path
from trainwright.recipe.files import read_json


class JsonSchema:
    """Score 1 if the whole answer is one JSON value that is valid under the schema in ``file``. The reference is
    ignored.

    Raises:
        RequestError: the file is not a JSON Schema.
    """

    setting = "json_schema"

    def __init__(self, file: str | Path) -> None:
        file = user_path(file)
        require("jsonschema", "json_schema")
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        schema = _read(file)
        self._file = file
        kind = validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            place = "/".join(map(str, error.absolute_path)) or "the top"
            raise RequestError(f"{file}: not a JSON Schema: at {place}: {error.message}") from None
        # An empty registry: references of a schema are never fetched.
        self._validator = kind(schema, registry=Registry())

    def __call__(self, reference: str, answer: str) -> float:
        """Return 1 if the answer is JSON that is valid under the schema, else 0."""
        from referencing.exceptions import Unresolvable

        try:
            value = json.loads(answer, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float(self._validator.is_valid(value))
        except Unresolvable as error:
            raise RequestError(f"{self._file}: the schema refers to {error.ref}, which is not in it") from None


def _read(file: Path) -> Any:
    schema = read_json(file)
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{file}: not a JSON Schema: it should be an object")
    return schema


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not allowed in JSON")
