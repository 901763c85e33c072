"""The layouts of a row, and how each becomes a conversation or a text.

    messages            {"messages": [{"role", "content"}, …]}
    conversations       {"conversations": [{"from": "human" | "gpt" | …, "value"}, …]}     (ShareGPT)
    prompt_completion   {"prompt", "completion"}, each a text, or each a list of messages
    instruction         {"instruction", "input" (may be left out), "output"}                (Alpaca)
    question_answer     {"question", "answer"}
    text                {"text"}

Two more hold answers to compare, and are told apart in pairs.py:

    preference          {"chosen", "rejected"}, and "prompt" where these are answers alone
    labelled            {"prompt", "completion", "label"}, the label true or false

Every layout but ``text`` becomes messages; a text ``system`` next to them opens the conversation. Assistant
turns are what is trained on, except those inside the ``prompt`` of a prompt and completion, empty ones, and those
with ``"target": false``.

A conversation that begins with the assistant answers nobody there: those first turns are left out, as FastChat
and what came of it do with ShareGPT's (https://github.com/lm-sys/FastChat, fastchat/train/train.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

from trainwright.data.row_files import Row, kind_of
from trainwright.data.tool_calls import as_text, calls_of, tools_of
from trainwright.errors import RequestError

# {"role": str, "content": str}, "target": False where not trained on, "tool_calls" as in tool_calls.py, "name" and
# "tool_call_id" of a tool's turn; the first of a conversation has its "tools", if there are any.
Message: TypeAlias = dict[str, Any]
Example: TypeAlias = list[Message] | str

# In the order in which they are looked for: the more telling first.
REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "text": ("text",),
    "labelled": ("prompt", "completion", "label"),
    "preference": ("chosen", "rejected"),
}
_OPTIONAL = {"instruction": ("input",), "preference": ("prompt",)}
# Layouts of examples that are one document each.
SINGLE = ("messages", "conversations", "prompt_completion", "instruction", "question_answer", "text")
_TRAINED_BY = {"preference": "task: dpo", "labelled": "task: dpo with dpo.loss: kto"}

_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("function_response", "observation"), "tool"),
}


# Where turns may stand, and what of a turn is its content.
_TURN_FIELDS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_CONTENTS = ("content", "value")
_EMPTY = "the answer is empty"
_UNASKED = "no assistant turn answers a user"


class NoTarget(RequestError):
    """A row with nothing to train on; the message is why, in the same words for all such rows."""


def layout_of(columns: Sequence[str], first_rows: Sequence[Row], wanted: str, layouts: Sequence[str] = SINGLE) -> str:
    """The layout of a source's rows: ``wanted``, or if that is ``auto`` the one of ``layouts`` that they have.

    Raises:
        RequestError: the columns do not have it, or none is recognised.
    """
    if wanted == "auto":
        return detect_format(columns, first_rows, layouts)
    wanted = "text" if wanted == "documents" else wanted
    check_format(columns, wanted)
    return wanted


def detect_format(columns: Sequence[str], first_rows: Sequence[Row] = (), layouts: Sequence[str] = SINGLE) -> str:
    """The first of ``layouts`` that rows with these ``columns`` have; of ``first_rows`` one must fill its fields.

    Raises:
        RequestError: none fits; lists the fields there are and what each layout needs.
    """
    fitting = [name for name in REQUIRED if _fits(columns, first_rows, name)]
    for name in layouts:
        if name in fitting:
            return name
    known = "; ".join(f"{name}: {' and '.join(REQUIRED[name])}" for name in layouts)
    reason = f"the rows have the fields {', '.join(columns)}, which is none of the layouts ({known})"
    if elsewhere := next((f"{name} rows, for {_TRAINED_BY[name]}" for name in fitting if name in _TRAINED_BY), None):
        reason += f"; these are {elsewhere}"
    raise RequestError(reason)


def _fits(columns: Sequence[str], first_rows: Sequence[Row], layout: str) -> bool:
    fields = REQUIRED[layout]
    filled = not first_rows or any(all(row.get(f) is not None for f in fields) for row in first_rows)
    return filled and set(fields) <= set(columns)


def check_format(columns: Sequence[str], layout: str) -> None:
    """Raise RequestError unless ``columns`` has what ``layout`` needs."""
    missing = [field for field in REQUIRED[layout] if field not in columns]
    if missing:
        raise RequestError(
            f"data.format {layout} needs the field {' and '.join(missing)}; the rows have {', '.join(columns)}"
        )


def unused_columns(columns: Sequence[str], layout: str) -> list[str]:
    """Columns that no part of an example is made from."""
    used = {*REQUIRED[layout], *_OPTIONAL.get(layout, ()), *(() if layout == "text" else ("system", "tools"))}
    return [column for column in columns if column not in used]


def to_example(row: Row, layout: str, remarks: Counter[str] | None = None) -> Example:
    """One row as a list of messages, at least one of them a target, or as a text.

    Args:
        remarks: counts the rows that are not taken as they are, by what they do, in words.

    Raises:
        NoTarget: the answer is empty, or no assistant turn answers a user.
        RequestError: a field is missing or of the wrong type, a user's turn is empty, or the roles are out of
        order.
    """
    if layout == "text":
        return answer_field(row, "text")
    found: set[str] = set()
    messages = conversation(_BUILDERS[layout](row), row, found)
    if remarks is not None:
        remarks.update(found)
    return messages


def conversation(messages: list[Message], row: Row, remarks: set[str]) -> list[Message]:
    """``messages`` made from a ``row``, with its system text, in order, and with a target.

    Args:
        remarks: gets what is done to the row, in words.

    Raises:
        NoTarget, RequestError: as ``to_example``.
    """
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    messages = _from_the_user_on(messages, remarks)
    _check_order(messages)
    _skip_empty(messages, remarks)
    if tools := tools_of(row):
        messages = [{**messages[0], "tools": tools}, *messages[1:]]
    return messages


def with_text_content(row: Row) -> Row:
    """The row with lists of text parts joined to one text, and tools as text: a column is of one type throughout."""
    turns = [field for field in _TURN_FIELDS if isinstance(row.get(field), list)]
    if isinstance(row.get("tools"), list):
        row = {**row, "tools": as_text(row["tools"])}
    return {**row, **{field: [_joined(turn) for turn in row[field]] for field in turns}} if turns else row


def _from_the_user_on(messages: list[Message], remarks: set[str]) -> list[Message]:
    start = int(messages[0]["role"] == "system")
    end = start
    while end < len(messages) and messages[end]["role"] == "assistant":
        end += 1
    if end == len(messages):
        raise NoTarget(_UNASKED)
    if end > start:
        remarks.add("begin with the assistant, whose turns before the first user's are left out")
    return messages[:start] + messages[end:]


def _skip_empty(messages: list[Message], remarks: set[str]) -> None:
    """An empty answer is no target; NoTarget where there is no other."""
    answers = [message for message in messages if message["role"] == "assistant" and message.get("target", True)]
    empty = [message for message in answers if not message["content"].strip() and "tool_calls" not in message]
    if len(empty) == len(answers):
        raise NoTarget(_EMPTY if answers else _UNASKED)
    for message in empty:
        message["target"] = False
        remarks.add("have an empty assistant turn among others; it is not trained on")


def _prompt_completion(row: Row) -> list[Message]:
    if isinstance(row.get("prompt"), str) or isinstance(row.get("completion"), str):
        return _pair(text_field(row, "prompt"), answer_field(row, "completion"))
    prompt, completion = turns_field(row, "prompt"), turns_field(row, "completion")
    for message in prompt:
        if message["role"] == "assistant":
            message["target"] = False
    return prompt + completion


def _instruction(row: Row) -> list[Message]:
    question = text_field(row, "instruction")
    given = row.get("input")
    if given is not None and not isinstance(given, str):
        raise RequestError(f"the field input should be text and is {kind_of(given)}")
    return _pair(f"{question}\n\n{given}" if given and given.strip() else question, answer_field(row, "output"))


_BUILDERS = {
    "messages": lambda row: turns_field(row, "messages"),
    "conversations": lambda row: turns_field(row, "conversations"),
    "prompt_completion": _prompt_completion,
    "instruction": _instruction,
    "question_answer": lambda row: _pair(text_field(row, "question"), answer_field(row, "answer")),
}


def _pair(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def answer_field(row: Row, field: str) -> str:
    """A text of the row that is trained on. Raises NoTarget where it is empty, and as ``text_field``."""
    value = row.get(field)
    if isinstance(value, str) and not value.strip():
        raise NoTarget("the text is empty" if field == "text" else _EMPTY)
    return text_field(row, field)


def text_field(row: Row, field: str) -> str:
    """A text of the row. Raises RequestError where it is missing, empty or something else."""
    value = row.get(field)
    if value is None:
        raise RequestError(f"the field {field} is missing; it has {_names(row)}")
    if not isinstance(value, str):
        raise RequestError(f"the field {field} should be text and is {kind_of(value)}")
    if not value.strip():
        raise RequestError(f"the field {field} is empty; fill it in or remove the row")
    return value


def turns_field(row: Row, field: str) -> list[Message]:
    """A list of turns of the row, by our names of roles. Raises RequestError where it is none."""
    value = row.get(field)
    if value is None:
        raise RequestError(f"the field {field} is missing; it has {_names(row)}")
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise RequestError(f"the field {field} should be a list of turns and is {what}")
    return [_turn(item, f"{field}[{index}]") for index, item in enumerate(value)]


def _turn(item: Any, place: str) -> Message:
    if not isinstance(item, dict):
        raise RequestError(f"{place} should be an object with role and content and is {kind_of(item)}")
    said = item.get("role") if item.get("role") is not None else item.get("from")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if said is None or (content is None and not item.get("tool_calls")):
        missing = "role (or from)" if said is None else "content (or value)"
        raise RequestError(f"{place} has no {missing}; it has {_names(item)}")
    role = _ROLES.get(str(said).lower())
    if role is None:
        raise RequestError(f"{place} has the role {said!r}; known are {', '.join(_ROLES)}")
    for extra in ("reasoning_content", "thinking"):
        if item.get(extra):
            raise RequestError(f"{place} has {extra}, which cannot be trained on yet; write it into the content")
    calls = calls_of(item, place)
    if calls and role != "assistant":
        raise RequestError(f"{place} has tool_calls and is the {role}'s; only the assistant calls tools")
    text = _content("" if content is None else content, place)
    # An empty system turn switches some models' default off; an empty answer is no mistake of the asker's.
    if not text.strip() and role not in ("system", "assistant"):
        raise RequestError(f"{place}, a turn of the {role}, is empty; fill it in or remove the row")
    message: Message = {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}
    if role == "tool":
        message |= {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}
    return {**message, "target": False} if item.get("target") is False and role == "assistant" else message


def _joined(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    if isinstance(turn.get("tool_calls"), list):
        turn = {**turn, "tool_calls": as_text(turn["tool_calls"])}
    lists = {key: _text_of(turn[key]) for key in _CONTENTS if isinstance(turn.get(key), list)}
    return {**turn, **{key: text for key, text in lists.items() if text is not None}} if lists else turn


def _text_of(parts: list[Any]) -> str | None:
    """A list of text parts as one text; None if any is no text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    known = [text for text in texts if isinstance(text, str)]
    return "".join(known) if len(known) == len(texts) else None


def _content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if (text := _text_of(content)) is not None:
            return text
        raise RequestError(f"{place} has content that is no text (an image?); only text can be trained on")
    raise RequestError(f"{place} has content that should be text and is {kind_of(content)}")


def _check_order(messages: list[Message]) -> None:
    """System first, then user (or tool) and assistant in turn."""
    roles = [message["role"] for message in messages]
    body = roles[1:] if roles[0] == "system" else roles
    before = "system"
    for index, role in enumerate(body, start=len(roles) - len(body)):
        allowed = {"system": ("user",), "user": ("assistant",), "tool": ("tool", "assistant")}
        if role not in allowed.get(before, ("user", "tool")):
            after = "at the beginning" if index == 0 else f"after {before}"
            shown = ", ".join(roles[:12]) + (", …" if len(roles) > 12 else "")
            raise RequestError(f"the roles are out of order: turn {index} is {role} {after} ({shown})")
        before = role


def _names(row: Row) -> str:
    return ", ".join(name for name, value in row.items() if value is not None) or "no fields"
