"""The recipe's JSON Schema, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from trainwright.recipe.schema import recipe_model


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file.

    No key is required, unlike in a complete recipe: a file can get any key from its includes.
    """
    schema = recipe_model().model_json_schema()
    file_names = {"type": "array", "items": {"type": "string", "minLength": 1}}
    schema["properties"]["include"] = {
        "anyOf": [{"type": "string", "minLength": 1}, file_names],
        "description": "Recipe files to merge first, relative to this one; the later file wins.",
    }
    _tidy(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Trainwright recipe",
        **schema,
    }


def _tidy(node: Any) -> None:
    """Remove what pydantic adds (titles from key names) and what partial files do not need."""
    if isinstance(node, list):
        for item in node:
            _tidy(item)
    elif isinstance(node, dict):
        node.pop("required", None)
        for key, value in list(node.items()):
            if key == "title" and isinstance(value, str):
                del node[key]
            else:
                _tidy(value)
