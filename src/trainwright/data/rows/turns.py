"""Read the turns of a conversation in the formats of published datasets, with normalized role names.

A row has tools as JSON or as text that contains JSON: ``tools`` next to the turns, a list of functions with their JSON
Schema, and ``tool_calls`` in assistant turns, a list of ``{"type": "function", "function": {"name", "arguments"}}``
(https://huggingface.co/docs/transformers/chat_extras). Calls without the outer object are accepted too. Row files are
read with the JSON as text, because no single column type fits the arguments of different calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from trainwright.data.sources.row_files import CONTENTS, Row, kind_of, text_of
from trainwright.errors import RequestError

# {"role": str, "content": str}, with "target": False if it is not trained on, "tool_calls" as from ``calls_of``, and
# "name" and "tool_call_id" for tool turns; the first turn of a conversation holds its "tools", if any.
Message: TypeAlias = dict[str, Any]
_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user", "prompter": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai", "bing", "bard", "claude"), "assistant"),
    **dict.fromkeys(("function_response", "observation", "function", "tool_response", "ipython"), "tool"),
}
# Assistant turns that hold only a tool call; the value is the call as JSON.
_CALLS = ("function_call", "function-call", "tool_call")
_A_TURN = 'a turn is {"role": "user", "content": "…"}'
# Keys of a turn that are read; _TRAINED lists keys of OpenAI and axolotl for whether a turn is a target.
_READ = {"role", "from", *CONTENTS, "tool_calls", "function_call", "name", "tool_call_id"}
_TRAINED = ("target", "weight", "train", "training")
# The conversation format of Anthropic's HH-RLHF and its derivatives.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def tools_of(row: Row, field: str = "tools") -> list[Any]:
    """Return the tools of a row, or an empty list; raise RequestError if they are not a list of objects."""
    return _objects(row.get(field), f"the field {field}")


def calls_of(turn: Row, place: str) -> list[Any]:
    """Return the calls of a turn, with arguments as objects; raise RequestError if they are invalid."""
    return [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(_objects(turn.get("tool_calls"), place))]


def names_in(turns: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the tools of a conversation, and of the tools that it calls."""
    tools = [tool.get("function", tool).get("name") for turn in turns for tool in turn.get("tools", ())]
    calls = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
    return [name for name in tools if isinstance(name, str)], calls


def as_row(messages: Sequence[Row]) -> Row:
    """Return a row of the layout ``messages``, with the tools next to the turns."""
    tools = [tool for turn in messages for tool in turn.get("tools", ())]
    turns = [{key: value for key, value in turn.items() if key != "tools"} for turn in messages]
    return {"messages": turns, "tools": tools} if tools else {"messages": turns}


def _objects(value: Any, place: str) -> list[Any]:
    if value is None or value == "":
        return []
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}: tools and calls must be JSON: {error}") from None
    else:
        given = _without_null(value)  # columns of objects have every key in each of them
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise RequestError(f"{place}: tools and calls must be a list of objects, not {kind_of(given)}")
    return given


def _call(call: Row, place: str) -> Row:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f'{place} has no name; a call is {{"function": {{"name", "arguments"}}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}.arguments are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.arguments should be an object, not {kind_of(arguments)}")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": name, "arguments": arguments}}


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def turns_field(row: Row, field: str) -> list[Message]:
    """Return a field of the row as a list of turns with normalized roles; raise RequestError if it is not one."""
    value = row.get(field)
    if value is None:
        raise RequestError(f"the field {field} is missing; it has {names_of(row)}")
    items = _listed(value, field)
    if not isinstance(items, list) or not items:
        what = "an empty list" if items == [] else kind_of(items)
        raise RequestError(f"the field {field} should be a list of turns, not {what}")
    return [_turn(item, f"{field}[{index}]") for index, item in enumerate(items)]


def transcript(text: str) -> list[Message] | None:
    """Return the turns of a text with ``Human: …`` and ``Assistant: …`` paragraphs, or None if it has none."""
    text = text.strip()
    if not text.startswith("Human:") or "\n\nAssistant:" not in text:
        return None
    _, *parts = _SPEAKER.split(text)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    if not turns[-1][1].strip():  # a prompt that ends with the name of the next speaker
        turns = turns[:-1]
    return [_turn({"role": role, "content": text.strip()}, role) for role, text in turns]


def names_of(row: Row) -> str:
    """Return the names of the fields that are not null, for messages."""
    return ", ".join(name for name, value in row.items() if value is not None) or "no fields"


def _listed(value: Any, field: str) -> Any:
    """Return a list of turns given as JSON text, as a single turn, or as an object of lists (Arrow format)."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return _listed(_parsed(value, field), field)
    if not isinstance(value, dict):
        return value
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    if len(lists) < len(value) or len({len(item) for item in lists.values()}) != 1:
        return [value]
    return [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]


def _parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(
            f"the field {field} should be a list of turns, not text that is not JSON; write it with json.dumps, or as "
            "a list"
        ) from None


def _turn(item: Any, place: str) -> Message:
    if not isinstance(item, dict):
        raise RequestError(f"{place} should be an object with role and content, not {kind_of(item)}; {_A_TURN}")
    named = item.get("role") if item.get("role") is not None else item.get("from")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if isinstance(item.get("function_call"), dict) and not item.get("tool_calls"):  # OpenAI's API before tools
        item = {**item, "tool_calls": [item["function_call"]]}
    if named is None or (content is None and not item.get("tool_calls")):
        missing = "role (or from)" if named is None else "content (or value)"
        raise RequestError(f"{place} has no {missing}; it has {names_of(item)}; {_A_TURN}")
    if str(named).lower() in _CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content, place)}
    role = _ROLES.get(str(named).lower())
    if role is None:
        known = ", ".join((*_ROLES, *_CALLS))
        raise RequestError(f"{place} has the unknown role {named!r}; choose from {known}")
    for extra in ("reasoning_content", "thinking"):
        if item.get(extra):
            raise RequestError(f"{place} has {extra}, which is not supported; write it into the content")
    calls = calls_of(item, place)
    if calls and role != "assistant":
        raise RequestError(f"{place} is a {role} turn with tool_calls; only assistant turns may have them")
    text = _content("" if content is None else content, place)
    # An empty system turn is valid: it disables the default of some models. An empty answer is not a target.
    if not text.strip() and role not in ("system", "assistant"):
        raise RequestError(f"{place}, a {role} turn, is empty; fill it in or remove the row")
    message: Message = {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}
    if role == "tool":
        message |= {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}
    return {**message, "target": False} if role == "assistant" and not _is_trained_on(item, place) else message


def _is_trained_on(item: Row, place: str) -> bool:
    flags = {key: item[key] for key in _TRAINED if item.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise RequestError(f"{place} has {key} {value!r}; expected true or false")
    return all(flags.values())


def unread_fields(row: Row, columns: Iterable[str]) -> list[str]:
    """Return the keys of the turns in ``columns`` that are not read."""
    turns = (turn for column in columns if isinstance(row.get(column), list) for turn in row[column])
    fields = (key for turn in turns if isinstance(turn, dict) for key, value in turn.items() if value is not None)
    return [key for key in dict.fromkeys(fields) if key not in _READ and key not in _TRAINED]


def _calls(content: Any, place: str) -> list[Any]:
    """Return the calls of a ShareGPT ``function_call`` turn."""
    try:
        given = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict | list) or not given:
        raise RequestError(
            f'{place} is a function call, whose value should be JSON such as {{"name": …, "arguments": {{…}}}}; '
            "correct it, or make it an assistant (gpt) turn with text"
        )
    return calls_of({"tool_calls": given if isinstance(given, list) else [given]}, place)


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if (text := text_of(content)) is not None:
            return text
        raise RequestError(f"{place} has content that is not text (an image?); only text is supported")
    raise RequestError(f"{place} has content that should be text, not {kind_of(content)}")
