"""Convert rows of any layout to a conversation or a text; layouts.py defines the layouts.

Every layout but ``text`` becomes messages with normalized role names; a ``system`` text in the row becomes the first
turn. Assistant turns are targets, except those inside the ``prompt`` of a prompt and completion, empty ones, and those
with ``"target": false``.

Assistant turns before the first user turn are left out, as FastChat does for ShareGPT
(https://github.com/lm-sys/FastChat, fastchat/train/train.py). Consecutive turns of one role are joined with an empty
line between them.

Read the tools and tool calls of a row, which are JSON or text that contains JSON.

``tools`` next to the turns is a list of functions with their JSON Schema, and ``tool_calls`` in assistant turns a list
of ``{"type": "function", "function": {"name", "arguments"}}``
(https://huggingface.co/docs/transformers/chat_extras). Calls without the outer object are accepted too. Row files are
read with the JSON as text, because no single column type fits the arguments of different calls.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.data.rows.layouts import MARKED, SINGLE, RowLayout, choose_layout
from trainwright.data.sources.row_files import CONTENTS, Row, describe_not_text, describe_type, join_texts
from trainwright.errors import RequestError
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import ROW_KINDS

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema
    from trainwright.recipe.sections.data import RowSettings


# {"role": str, "content": str}, with "target": False if it is not trained on, "tool_calls" as from ``read_calls``, and
# "name" and "tool_call_id" for tool turns; the first turn of a conversation holds its "tools", if any.
Message: TypeAlias = dict[str, Any]
Example: TypeAlias = list[Message] | str

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
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the reasoning before an answer
_READ = {"role", "from", *CONTENTS, *_REASONING, "tool_calls", "function_call", "name", "tool_call_id"}
_TRAINED = ("target", "weight", "train", "training")
# The conversation format of Anthropic's HH-RLHF and its derivatives.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_EMPTY = "the answer is empty"
_UNASKED = "no assistant turn follows a user turn"
_UNTRAINED = "every assistant turn is marked as not trained on"


class TurnsError(RequestError):
    """A conversation that the template cannot render or whose turns cannot be located; ``index`` is its batch index."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class NoTarget(RequestError):
    """A row without targets; the message is the reason, the same for all such rows."""


@dataclass(frozen=True)
class RowReader:
    """The rows of a task: the layouts they may have, and how a row becomes the sequences of an example.

    Attributes:
        layouts: names of ``layouts.REQUIRED`` in the order of detection.
        convert: returns a row as ``(role, text or conversation)`` of each sequence.
        extra: a further column that every source must have.
        split: divides the sequences of a row into examples with equally many.
    """

    name: str
    layouts: tuple[str, ...]
    convert: Callable[[Row, RowLayout, Counter[str] | None], list[tuple[int, Example]]]
    extra: str | None = None
    split: Callable[[list[tuple[int, Example]]], list[list[tuple[int, Example]]]] = lambda sequences: [sequences]

    def layout(
        self, columns: Sequence[str], first_rows: Sequence[Row], settings: RowSettings, where: str | None = None
    ) -> RowLayout:
        """Return the layout of a source's rows; raise RequestError, with ``where`` they are, if they fit none."""
        before = "" if where is None else f"{where}: "
        try:
            layout = choose_layout(columns, first_rows, settings, self.layouts)
        except RequestError as error:
            raise RequestError(f"{before}{error}") from None
        if self.extra is None:
            return layout
        if self.extra not in columns:
            raise RequestError(
                f"{before}the rows have no field {self.extra}, which holds other answers to each question; trainwright "
                "data alternates writes it"
            )
        return RowLayout(layout, layout.columns, (*layout.extra, self.extra), layout.settings)

    def narrowing(
        self, settings: RowSettings, columns: Sequence[str], first_rows: Sequence[Row]
    ) -> Callable[[Row], Row]:
        """Return a function that reduces rows to the columns and the keys of turns that are used.

        The values of other keys of turns become text, so that they do not differ in type.
        """
        layout = self.layout(columns, first_rows, settings)
        return functools.partial(_select_used, layout)

    def sequences(self, row: Row, layout: RowLayout, remarks: Counter[str] | None = None) -> list[tuple[int, Example]]:
        """Return a row as ``(role, text or conversation)`` of each sequence of its example, or examples: see ``split``.

        Raises:
            NoTarget, RequestError: as in ``to_example``.
        """
        sequences = self.convert(row, layout, remarks)
        columns = [column for column in layout.used if column != layout.column("tools") and layout not in MARKED]
        if remarks is not None and (more := list_unread_fields(row, columns)):
            remarks[f"have fields in their turns that are not used: {', '.join(more)}"] += 1
        return sequences


def _select_used(layout: RowLayout, row: Row) -> Row:
    def used(turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        return {
            key: value if key in _READ or key in _TRAINED or value is None else json.dumps(value)
            for key, value in turn.items()
        }

    return {
        name: [used(turn) for turn in value] if isinstance(value, list) and layout not in MARKED else value
        for name, value in row.items()
        if name in layout.used
    }


def to_single_sequence(row: Row, layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
    """Return a row as the role and the content of the only sequence of an example."""
    return [(0, to_example(row, layout, remarks))]


EXAMPLES = RowReader("examples", SINGLE, to_single_sequence)


def look_up_reader(recipe: RecipeSchema, key: str = "data.train") -> RowReader:
    """Return the reader of the rows at ``key`` for the recipe's task; raise RequestError if it cannot be made."""
    name = recipe.spec.rows(recipe, key)
    # A module:Name is the task's own, which was imported with it.
    kind: RowReader | Callable[[RecipeSchema], RowReader] = (
        load(name, f"kind of rows {name}") if ":" in name else ROW_KINDS.get(name)
    )
    return kind if isinstance(kind, RowReader) else kind(recipe)


def split_by_turn(sequences: list[tuple[int, Example]]) -> list[list[tuple[int, Example]]]:
    """Return one example for each turn of a conversation that is a target, with the turns before it as its prompt."""
    role, example = sequences[0]
    if isinstance(example, str) or len(sequences) > 1:  # a text, or answers to compare
        return [sequences]
    answers = [at for at, turn in enumerate(example) if turn["role"] == "assistant" and turn.get("target", True)]
    return [[(role, [*to_prompt(example[:at]), example[at]])] for at in answers]


def to_prompt(turns: Sequence[Message]) -> list[Message]:
    """Return turns that are not trained on."""
    return [{**turn, "target": False} if turn["role"] == "assistant" else turn for turn in turns]


def to_example(row: Row, layout: str, remarks: Counter[str] | None = None) -> Example:
    """Convert one row to a text, or to a list of messages with at least one target.

    Args:
        layout: its name, or the result of ``layouts.choose_layout`` with the columns that its fields are read from.
        remarks: counts the rows that were changed, by the change in words.

    Raises:
        NoTarget: the answer is empty, no assistant turn answers a user, or none of them is a target.
        RequestError: a field is missing or of the wrong type, a user turn is empty, or the roles are out of order.
    """
    layout = layout if isinstance(layout, RowLayout) else RowLayout(layout)
    if layout == "text":
        return read_answer_field(row, layout.column("text"))
    changes: set[str] = set()
    messages = complete_conversation(_BUILDERS[layout](row, layout), row, changes, layout)
    if remarks is not None:
        remarks.update(changes)
    return messages


def complete_conversation(messages: list[Message], row: Row, remarks: set[str], layout: RowLayout) -> list[Message]:
    """Complete the ``messages`` of a ``row``: add its system text, join turns, check the order, and mark targets.

    Args:
        remarks: collects the changes to the row, in words.

    Raises:
        NoTarget, RequestError: as in ``to_example``.
    """
    column = layout.column("system")
    system = row.get(column)
    if layout.settings.drop_system_message and (system or messages[0]["role"] == "system"):
        messages, system = [*dropwhile(lambda turn: turn["role"] == "system", messages)], None
        remarks.add("have a system turn, which is left out")
        if not messages:
            raise NoTarget(_UNASKED)
    if layout.settings.system is not None and messages[0]["role"] != "system" and not system:
        system = layout.settings.system
    if isinstance(system, str) and system.strip():
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        elif messages[0]["content"].strip() != system.strip():
            remarks.add(f"have a separate system turn, so the column {column} is not used")
    messages = _join_turns(_trim_to_user(messages, remarks), remarks)
    _check_order(messages)
    _skip_empty(messages, remarks)
    tools_column = layout.column("tools")
    if tools := _parse_objects(row.get(tools_column), f"the field {tools_column}"):
        messages = [{**messages[0], "tools": tools}, *messages[1:]]
    return messages


def _join_turns(messages: list[Message], remarks: set[str]) -> list[Message]:
    """Join consecutive turns of one role, except tool turns, which each answer one call."""
    joined_messages: list[Message] = messages[:1]
    for message in messages[1:]:
        last = joined_messages[-1]
        if message["role"] != last["role"] or message["role"] == "tool" or message.get("target") != last.get("target"):
            joined_messages.append(message)
            continue
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        texts: Message = {
            key: "\n\n".join(turn[key] for turn in (last, message) if turn.get(key, "").strip())
            for key in ("content", "reasoning")
            if key in last or key in message
        }
        joined_messages[-1] = {**last, **texts, **({"tool_calls": calls} if calls else {})}
        if last.get("name") != message.get("name"):
            joined_messages[-1].pop("name", None)
            remarks.add("have turns of one role with different names one after another, which are joined without them")
        if "tool_calls" not in message:  # text followed by a call is one turn in all formats
            remarks.add("have turns of one role one after another, which are joined with an empty line between them")
    return joined_messages


def _trim_to_user(messages: list[Message], remarks: set[str]) -> list[Message]:
    start = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    end = start
    while end < len(messages) and messages[end]["role"] == "assistant":
        end += 1
    if end == len(messages):
        raise NoTarget(_UNASKED)
    if end > start:
        remarks.add("begin with assistant turns, which are removed up to the first user turn")
    return messages[:start] + messages[end:]


def _skip_empty(messages: list[Message], remarks: set[str]) -> None:
    """Mark empty answers as not targets; raise NoTarget if there is no other answer."""
    answers = [message for message in messages if message["role"] == "assistant" and message.get("target", True)]
    empty = [message for message in answers if not message["content"].strip() and "tool_calls" not in message]
    if len(empty) == len(answers):
        raise NoTarget(_EMPTY if answers else _UNTRAINED if messages[-1]["role"] == "assistant" else _UNASKED)
    for message in empty:
        message["target"] = False
        remarks.add("have an empty assistant turn among others; it is not trained on")


def _build_prompt_completion(row: Row, layout: RowLayout) -> list[Message]:
    prompt_column, completion_column = layout.column("prompt"), layout.column("completion")
    if isinstance(row.get(prompt_column), list) and not isinstance(row.get(completion_column), str):
        prompt, completion = read_turns_field(row, prompt_column), read_turns_field(row, completion_column)
    elif isinstance(row.get(prompt_column), list):
        prompt = read_turns_field(row, prompt_column)
        completion = [{"role": "assistant", "content": read_answer_field(row, completion_column)}]
    else:
        return _build_pair(read_text_field(row, prompt_column), read_answer_field(row, completion_column))
    for message in prompt:
        if message["role"] == "assistant":
            message["target"] = False
    return prompt + completion


def _build_question_answer(row: Row, layout: RowLayout) -> list[Message]:
    fields = ("instruction", "output") if layout == "instruction" else ("question", "answer")
    question_column, answer_column = (layout.column(field) for field in fields)
    if layout.settings.prompt is not None:
        return _build_pair(_fill_prompt(row, layout), read_answer_field(row, answer_column))
    return _build_pair(
        add_input(row, layout, read_text_field(row, question_column)), read_answer_field(row, answer_column)
    )


_BUILDERS = {
    "messages": lambda row, layout: read_turns_field(row, layout.column("messages")),
    "conversations": lambda row, layout: read_turns_field(row, layout.column("conversations")),
    "prompt_completion": _build_prompt_completion,
    "instruction": _build_question_answer,
    "question_answer": _build_question_answer,
}


def _build_pair(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _fill_prompt(row: Row, layout: RowLayout) -> str:
    """Return the user's turn that the settings make of a row's columns."""
    settings, more = layout.settings, row.get(layout.column("input"))
    template = settings.prompt
    if settings.prompt_without_input is not None and (more is None or not str(more).strip()):
        template = settings.prompt_without_input
    assert template is not None
    return template.format_map({name: _read_value(row, column) for name, column in layout.prompt_columns.items()})


def _read_value(row: Row, column: str) -> str:
    value = row.get(column)
    if isinstance(value, list | dict):
        raise RequestError(f"the field {column} should be text, not {describe_type(value)}")
    return "" if value is None else str(value)


def add_input(row: Row, layout: RowLayout, question: str) -> str:
    """Append the optional input text of the row to a question."""
    field = layout.column("input")
    more = row.get(field)
    if more is not None and not isinstance(more, str):
        raise RequestError(f"the field {field} should be text, not {describe_type(more)}")
    return f"{question}\n\n{more}" if more and more.strip() else question


def read_answer_field(row: Row, field: str) -> str:
    """Return a text field that is trained on; raise NoTarget if it is empty, otherwise as ``read_text_field``."""
    value = row.get(field)
    if isinstance(value, str) and not value.strip():
        raise NoTarget("the text is empty" if field == "text" else _EMPTY)
    if value is None:
        raise RequestError(
            f"the field {field} is missing; it has {format_names(row)}: fill it in, remove the row, or set it to an "
            "empty "
            "text to skip and count the row"
        )
    return read_text_field(row, field)


def read_text_field(row: Row, field: str) -> str:
    """Return a text field of the row; raise RequestError if it is missing, empty or not text."""
    value = row.get(field)
    if value is None:
        raise RequestError(f"the field {field} is missing; it has {format_names(row)}")
    if not isinstance(value, str):
        hint = "; put it in quotes" if isinstance(value, int | float) else ""
        raise RequestError(f"the field {field} should be text, not {describe_type(value)}{hint}")
    if not value.strip():
        raise RequestError(f"the field {field} is empty; fill it in or remove the row")
    return value


def _check_order(messages: list[Message]) -> None:
    """Check that an optional system turn comes first, then user (or tool) and assistant turns alternate."""
    roles = [message["role"] for message in messages]
    body = roles[1:] if roles[0] == "system" else roles
    before = "system"
    for index, role in enumerate(body, start=len(roles) - len(body)):
        roles_after = {"system": ("user",), "user": ("assistant",), "tool": ("tool", "assistant")}
        if role not in roles_after.get(before, ("user", "tool")):
            after = "at the beginning" if index == 0 else f"after {before}"
            order = ", ".join(roles[:12]) + (", …" if len(roles) > 12 else "")
            raise RequestError(
                f"the roles are out of order: turn {index} is {role} {after} ({order}); expected an optional system "
                "turn, then alternating user and assistant turns, with tool turns after the assistant's calls"
            )
        before = role


def read_turns_field(row: Row, field: str) -> list[Message]:
    """Return a field of the row as a list of turns with normalized roles; raise RequestError if it is not one."""
    value = row.get(field)
    if value is None:
        raise RequestError(f"the field {field} is missing; it has {format_names(row)}")
    items = _normalize_turns(value, field)
    if not isinstance(items, list) or not items:
        description = "an empty list" if items == [] else describe_type(items)
        raise RequestError(f"the field {field} should be a list of turns, not {description}")
    return [_parse_turn(item, f"{field}[{index}]") for index, item in enumerate(items)]


def parse_transcript(text: str) -> list[Message] | None:
    """Return the turns of a text with ``Human: …`` and ``Assistant: …`` paragraphs, or None if it has none."""
    text = text.strip()
    if not text.startswith("Human:") or "\n\nAssistant:" not in text:
        return None
    _, *parts = _SPEAKER.split(text)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    if not turns[-1][1].strip():  # a prompt that ends with the name of the next speaker
        turns = turns[:-1]
    return [_parse_turn({"role": role, "content": text.strip()}, role) for role, text in turns]


def _normalize_turns(value: Any, field: str) -> Any:
    """Return a list of turns given as JSON text, as a single turn, or as an object of lists (Arrow format)."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        return _normalize_turns(_parse_turns(value, field), field)
    if not isinstance(value, dict):
        return value
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    if len(lists) < len(value) or len({len(item) for item in lists.values()}) != 1:
        return [value]
    return [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]


def _parse_turns(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(
            f"the field {field} should be a list of turns, not text that is not JSON; write it with json.dumps, or as "
            "a list"
        ) from None


def _parse_turn(item: Any, location: str) -> Message:
    if not isinstance(item, dict):
        raise RequestError(
            f"{location} should be an object with role and content, not {describe_type(item)}; {_A_TURN}"
        )
    raw_role = item.get("role") if item.get("role") is not None else item.get("from")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    call = item.get("function_call")  # OpenAI's API before tools; JSON text from a row file
    if isinstance(call, dict | str) and call and not item.get("tool_calls"):
        item = {**item, "tool_calls": f"[{call}]" if isinstance(call, str) else [call]}
    if raw_role is None or (content is None and not item.get("tool_calls")):
        missing = "role (or from)" if raw_role is None else "content (or value)"
        raise RequestError(f"{location} has no {missing}; it has {format_names(item)}; {_A_TURN}")
    if str(raw_role).lower() in _CALLS:
        return {"role": "assistant", "content": "", "tool_calls": read_content_calls(content, location)}
    role = _ROLES.get(str(raw_role).lower())
    if role is None:
        choices = ", ".join((*_ROLES, *_CALLS))
        raise RequestError(f"{location} has the unknown role {raw_role!r}; choose from {choices}")
    calls = read_calls(item, location)
    if calls and role != "assistant":
        raise RequestError(f"{location} is a {role} turn with tool_calls; only assistant turns may have them")
    text = _read_content("" if content is None else content, location)
    # An empty system turn is valid: it disables the default of some models. An empty answer is not a target.
    if not text.strip() and role not in ("system", "assistant"):
        raise RequestError(f"{location}, a {role} turn, is empty; fill it in or remove the row")
    message: Message = {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}
    for key in ("name", "tool_call_id") if role == "tool" else ("name",):
        if isinstance(item.get(key), str) and item[key]:
            message[key] = item[key]
    if role == "assistant" and (reasoning := _read_reasoning(item, location)):
        message["reasoning"] = reasoning
    return {**message, "target": False} if role == "assistant" and not _is_trained_on(item, location) else message


def _read_reasoning(item: Row, location: str) -> str:
    """Return the reasoning of an assistant turn, or ""; raise RequestError if two fields of it differ."""
    fields = {key: item[key] for key in _REASONING if item.get(key) not in (None, "")}
    for key, value in fields.items():
        if not isinstance(value, str):
            raise RequestError(f"{location} has {key} that should be text, not {describe_type(value)}")
    texts = list(dict.fromkeys(text for text in fields.values() if text.strip()))
    if len(texts) > 1:
        raise RequestError(f"{location} has {' and '.join(fields)}, which differ; keep one of them")
    return texts[0] if texts else ""


def _is_trained_on(item: Row, location: str) -> bool:
    flags = {key: item[key] for key in _TRAINED if item.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise RequestError(f"{location} has {key} {value!r}; expected true or false")
    return all(flags.values())


def _read_content(content: Any, location: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if (text := join_texts(content)) is not None:
            return text
        raise RequestError(f"{location}.content {describe_not_text(content)}")
    raise RequestError(f"{location} has content that should be text, not {describe_type(content)}")


def list_unread_fields(row: Row, columns: Iterable[str]) -> list[str]:
    """Return the keys of the turns in ``columns`` that are not read."""
    turns = (turn for column in columns if isinstance(row.get(column), list) for turn in row[column])
    fields = (key for turn in turns if isinstance(turn, dict) for key, value in turn.items() if value is not None)
    return [key for key in dict.fromkeys(fields) if key not in _READ and key not in _TRAINED]


def format_names(row: Row) -> str:
    """Return the names of the fields that are not null, for messages."""
    return ", ".join(name for name, value in row.items() if value is not None) or "no fields"


def to_row(messages: Sequence[Row]) -> Row:
    """Return a row of the layout ``messages``, with the tools next to the turns."""
    tools = [tool for turn in messages for tool in turn.get("tools", ())]
    turns = [{key: value for key, value in turn.items() if key != "tools"} for turn in messages]
    return {"messages": turns, "tools": tools} if tools else {"messages": turns}


def read_calls(turn: Row, location: str) -> list[Any]:
    """Return the calls of a turn, with arguments as the row has them; raise RequestError if they are invalid."""
    return [
        _parse_call(call, f"{location}.tool_calls[{i}]")
        for i, call in enumerate(_parse_objects(turn.get("tool_calls"), location))
    ]


def read_content_calls(content: Any, location: str) -> list[Any]:
    """Return the calls of a ShareGPT ``function_call`` turn."""
    try:
        value = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict | list) or not value:
        raise RequestError(
            f'{location} is a function call, whose value should be JSON such as {{"name": …, "arguments": {{…}}}}; '
            "correct it, or make it an assistant (gpt) turn with text"
        )
    calls = value if isinstance(value, list) else [value]
    # As text, values of null stay: the writer has put them there.
    return read_calls({"tool_calls": json.dumps(calls) if isinstance(content, str) else calls}, location)


def parse_arguments(call: Row) -> dict[str, Any]:
    """Return the arguments of a call from ``read_calls`` as an object."""
    value = call["function"]["arguments"]
    arguments: dict[str, Any] = json.loads(value) if isinstance(value, str) else value
    return arguments


def list_tool_names(turns: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the tools of a conversation, and of the tools that it calls."""
    tools = [tool.get("function", tool).get("name") for turn in turns for tool in turn.get("tools", ())]
    calls = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
    return [name for name in tools if isinstance(name, str)], calls


def _parse_objects(value: Any, location: str) -> list[Any]:
    if value is None or value == "":
        return []
    objects = value
    if isinstance(value, str):
        try:
            objects = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{location}: tools and calls must be JSON: {error}") from None
    else:
        objects = _drop_nulls(value)  # columns of objects have every key in each of them
    if not isinstance(objects, list) or not all(isinstance(item, dict) for item in objects):
        raise RequestError(f"{location}: tools and calls must be a list of objects, not {describe_type(objects)}")
    return objects


def _parse_call(call: Row, location: str) -> Row:
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
        raise RequestError(f"{location}.arguments should be an object, not {describe_type(value)}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value
