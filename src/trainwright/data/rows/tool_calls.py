"""Read the tools and tool calls of a row, which are JSON or text that contains JSON.

``tools`` next to the turns is a list of functions with their JSON Schema, and ``tool_calls`` in assistant turns a list
of ``{"type": "function", "function": {"name", "arguments"}}``
(https://huggingface.co/docs/transformers/chat_extras). Calls without the outer object are accepted too. Row files are
read with the JSON as text, because no single column type fits the arguments of different calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainwright.data.sources.row_files import Row, kind_of
from trainwright.errors import RequestError


def tools_of(row: Row, field: str = "tools") -> list[Any]:
    """Return the tools of a row, or an empty list; raise RequestError if they are not a list of objects."""
    return _objects(row.get(field), f"the field {field}")


def calls_of(turn: Row, location: str) -> list[Any]:
    """Return the calls of a turn, with arguments as the row has them; raise RequestError if they are invalid."""
    return [
        _call(call, f"{location}.tool_calls[{i}]") for i, call in enumerate(_objects(turn.get("tool_calls"), location))
    ]


def calls_of_content(content: Any, location: str) -> list[Any]:
    """Return the calls of a ShareGPT ``function_call`` turn."""
    try:
        parsed = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict | list) or not parsed:
        raise RequestError(
            f'{location} is a function call, whose value should be JSON such as {{"name": …, "arguments": {{…}}}}; '
            "correct it, or make it an assistant (gpt) turn with text"
        )
    calls = parsed if isinstance(parsed, list) else [parsed]
    # As text, values of null stay: the writer has put them there.
    return calls_of({"tool_calls": json.dumps(calls) if isinstance(content, str) else calls}, location)


def arguments_of(call: Row) -> dict[str, Any]:
    """Return the arguments of a call from ``calls_of`` as an object."""
    value = call["function"]["arguments"]
    parsed: dict[str, Any] = json.loads(value) if isinstance(value, str) else value
    return parsed


def names_in(turns: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the tools of a conversation, and of the tools that it calls."""
    tools = [tool.get("function", tool).get("name") for turn in turns for tool in turn.get("tools", ())]
    calls = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
    return [name for name in tools if isinstance(name, str)], calls


def _objects(value: Any, location: str) -> list[Any]:
    if value is None or value == "":
        return []
    objects = value
    if isinstance(value, str):
        try:
            objects = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{location}: tools and calls must be JSON: {error}") from None
    else:
        objects = _without_null(value)  # columns of objects have every key in each of them
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise RequestError(f"{location}: tools and calls must be a list of objects, not {kind_of(objects)}")
    return objects


def _call(call: Row, location: str) -> Row:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f'{location} has no name; a call is {{"function": {{"name", "arguments"}}}}')
    raw_arguments = function.get("arguments", {})
    arguments = {} if raw_arguments in ("", None) else raw_arguments
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{location}.arguments are not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{location}.arguments should be an object, not {kind_of(value)}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value
