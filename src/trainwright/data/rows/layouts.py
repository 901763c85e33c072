"""The layouts of rows, and the mapping from a source's columns to their fields.

    messages            {"messages": [{"role", "content"}, …]}
    conversations       {"conversations": [{"from": "human" | "gpt" | …, "value"}, …]}     (ShareGPT)
    prompt_completion   {"prompt", "completion"}, each a text or a list of messages
    instruction         {"instruction", "input" (optional), "output"}                       (Alpaca)
    question_answer     {"question", "context" (optional), "answer"}
    text                {"text"}
    segments, tokens    rows that mark their targets themselves, see marked.py

Two more hold answers to compare, see pairs.py:

    preference          {"chosen", "rejected"}, and "prompt" if these are only answers
    labelled            {"prompt", "completion", "label"}, where the label is true or false

Columns with these names are matched first. If no layout has all its columns, common names of published datasets are
tried: {"query", "response"}, {"instruction", "context", "response"} (Dolly), {"system", "user", "assistant"}, ….
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from trainwright.data.sources.row_files import CHOSEN_NAMES, MESSAGES_NAMES, REJECTED_NAMES, Row
from trainwright.errors import RequestError
from trainwright.recipe.sections.data import RowSettings

# In order of detection: more specific layouts first.
REQUIRED: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "text": ("text",),
    "segments": ("segments",),
    "tokens": ("input_ids",),
    "labelled": ("prompt", "completion", "label"),
    "preference": ("chosen", "rejected"),
}
_OPTIONAL = {
    "instruction": ("input",),
    "question_answer": ("input",),
    "preference": ("prompt", "input"),
    "tokens": ("labels", "completion_mask", "assistant_masks", "attention_mask"),
}
_OF_CONVERSATIONS = ("system", "tools")
# Layouts whose examples are one conversation or text each.
SINGLE = ("messages", "conversations", "prompt_completion", "instruction", "question_answer", "text")
# Layouts whose rows mark their targets.
MARKED = ("segments", "tokens")
# Layouts that no chat template writes.
PLAIN = ("text", *MARKED)
_TRAINED_BY = {"preference": "task: dpo", "labelled": "task: dpo with dpo.loss: kto"}

# Other names of question and answer columns, the more specific first.
_QUESTION_NAMES = (
    *("question", "prompt", "instruction", "query", "problem", "user", "human", "input"),
    *("context", "title"),
)
_ANSWER_NAMES = ("answer", "response", "completion", "output", "reply", "assistant", "gpt", "bot", "solution", "target")
_SUMMARIES = ("summary", "highlights")  # summaries of a text, which is then not a target
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "messages": MESSAGES_NAMES,
    "question": _QUESTION_NAMES,
    "instruction": _QUESTION_NAMES,
    "prompt": (*_QUESTION_NAMES, "messages", "conversations"),
    "input": ("context",),
    "answer": _ANSWER_NAMES,
    "output": _ANSWER_NAMES,
    "completion": _ANSWER_NAMES,
    "text": ("content", "document", "raw_content", "article", "code"),
    "chosen": CHOSEN_NAMES,
    "rejected": REJECTED_NAMES,
    "system": ("system_prompt", "system_message"),
    "tools": ("functions",),
}


class RowLayout(str):
    """A layout name, as in ``data.format``, with the columns that its fields are read from.

    Attributes:
        columns: maps field names to column names, where they differ.
        extra: further columns that are used.
        settings: how the rows are read.
    """

    columns: Mapping[str, str]
    extra: Sequence[str]
    settings: RowSettings

    def __new__(
        cls,
        name: str,
        columns: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
        settings: RowSettings | None = None,
    ) -> RowLayout:
        """Create the layout ``name`` with the columns of its fields."""
        layout = super().__new__(cls, name)
        layout.extra = extra
        layout.settings = RowSettings() if settings is None else settings
        layout.columns = {field: column for field, column in (columns or {}).items() if field != column}
        return layout

    def column(self, field: str) -> str:
        """Return the column that a field is read from, or "" if the field is not read."""
        return self.columns.get(field, field)

    @property
    def prompt_columns(self) -> dict[str, str]:
        """Return the columns of the names in the settings' prompts: fields, or columns as they are called."""
        prompts = filter(None, (self.settings.prompt, self.settings.prompt_without_input))
        names = (name for prompt in prompts for _, name, _, _ in Formatter().parse(prompt) if name is not None)
        # The field question is not read where a prompt is set, and the column of that name still is.
        return {name: self.settings.columns.get(name) or self.column(name) or name for name in names}

    def unused(self, columns: Sequence[str]) -> list[str]:
        """Return the columns of a source that examples do not use."""
        return [column for column in columns if column not in self.used]

    @property
    def used(self) -> list[str]:
        """Return the columns that an example is made from, including optional ones."""
        more = () if self in PLAIN else _OF_CONVERSATIONS
        return [*(self.column(field) for field in (*REQUIRED[self], *_OPTIONAL.get(self, ()), *more)), *self.extra]

    @property
    def renamed(self) -> dict[str, str]:
        """Return a mapping from column names to field names, where they differ."""
        return {column: field for field, column in self.columns.items() if column}

    @property
    def read_as(self) -> str:
        """Describe which columns are read as other fields; empty if there are none."""
        return ", ".join(f"{column} as {field}" for column, field in self.renamed.items())


def list_columns(rows: Iterable[Row]) -> list[str]:
    """Return the names of the columns of rows, in the order in which they occur."""
    return list(dict.fromkeys(name for row in rows for name in row))


def describe_unused_columns(columns: Sequence[str]) -> str:
    """Return the message about columns that examples do not use."""
    return f"not used: the column{'s' if len(columns) > 1 else ''} {', '.join(columns)}"


def choose_layout(
    columns: Sequence[str], first_rows: Sequence[Row], settings: RowSettings, layouts: Sequence[str] = SINGLE
) -> RowLayout:
    """Return the layout of a source's rows: the one that is set, or the detected one of ``layouts`` if that is auto.

    Args:
        settings: how the rows are read.

    Raises:
        RequestError: the columns do not fit the layout, or no layout is recognized.
    """
    fields = _map_fields(settings, columns)
    field_names = [fields.get(column, "" if column in settings.columns else column) for column in columns]
    rows = [{fields.get(column, column): value for column, value in row.items()} for row in first_rows]
    if settings.prompt is not None or settings.prompt_without_input is not None:
        layout = _build_prompt_layout(field_names, settings, layouts)
    elif settings.format == "auto" or not isinstance(settings.format, str):
        among = layouts if settings.format == "auto" else [name for name in settings.format if name in layouts]
        layout = detect_format([name for name in field_names if name], rows, among)
    else:
        layout = check_format(
            [name for name in field_names if name], "text" if settings.format == "documents" else settings.format
        )
    read = {field: layout.column(field) for field in (*REQUIRED[layout], *settings.columns, *layout.columns)}
    back = {field: column for column, field in fields.items()}
    read = {field: back.get(column, column) for field, column in read.items()}
    layout = RowLayout(layout, read, settings=settings)
    if unknown := [column for column in layout.prompt_columns.values() if column not in columns]:
        raise RequestError(f"data.prompt: the rows have no column {unknown[0]}; they have {', '.join(columns)}")
    layout.extra = list(layout.prompt_columns.values())
    return layout


def _map_fields(settings: RowSettings, columns: Sequence[str]) -> dict[str, str]:
    """Return the fields of the columns that data.columns maps; raise RequestError for unknown fields and columns."""
    names = {*(field for fields in (*REQUIRED.values(), *_OPTIONAL.values()) for field in fields), *_OF_CONVERSATIONS}
    for field, column in settings.columns.items():
        if field not in names:
            raise RequestError(f"data.columns: {field} is no field of a layout; choose from {', '.join(sorted(names))}")
        if column not in columns:
            raise RequestError(f"data.columns: the rows have no column {column}; they have {', '.join(columns)}")
    return {column: field for field, column in settings.columns.items()}


def _build_prompt_layout(columns: Sequence[str], settings: RowSettings, layouts: Sequence[str]) -> RowLayout:
    """Return the layout of rows whose user turn is made by data.prompt: only the answer is matched."""
    formats = {settings.format} if isinstance(settings.format, str) else {*settings.format}
    if "question_answer" not in layouts or not formats & {"auto", "question_answer", "instruction"}:
        raise RequestError("data.prompt: is for rows of a question and one answer; remove it")
    answer = _find_column(("answer", *_ANSWER_NAMES), columns)
    if answer is None:
        raise RequestError(
            f"data.prompt: no column is the answer; the rows have {', '.join(columns)}; name it with data.columns, "
            "such as {answer: gold}"
        )
    return _add_optional_fields("question_answer", {"question": "", "answer": answer}, columns)


def detect_format(columns: Sequence[str], first_rows: Sequence[Row] = (), layouts: Sequence[str] = SINGLE) -> RowLayout:
    """Return the first of ``layouts`` that fits ``columns``; one of ``first_rows`` must have all its fields.

    Raises:
        RequestError: no layout fits; the message lists the columns and the fields of each layout.
    """
    fitting = [name for name in REQUIRED if _are_filled(first_rows, REQUIRED[name]) and {*REQUIRED[name]} <= {*columns}]
    for name in layouts:
        if name in fitting:
            return _add_optional_fields(name, {field: field for field in REQUIRED[name]}, columns)
    elsewhere = next((f"{name} rows, for {_TRAINED_BY[name]}" for name in fitting if name in _TRAINED_BY), None)
    if elsewhere is None and (layout := _find_by_other_names(columns, first_rows, layouts)):
        return layout
    choices = "; ".join(f"{name}: {' and '.join(REQUIRED[name])}" for name in layouts)
    reason = f"the rows have the fields {', '.join(columns)}, which match no known layout ({choices})"
    if elsewhere is not None:
        raise RequestError(f"{reason}; these are {elsewhere}")
    fields = REQUIRED["question_answer" if "question_answer" in layouts else layouts[0]]
    example = ", ".join(f"{field}: COLUMN" for field in fields)
    raise RequestError(
        f"{reason}; name the columns with data.columns, such as '{{{example}}}', or map them with data prepare --map"
    )


def check_format(columns: Sequence[str], name: str) -> RowLayout:
    """Return the layout ``name`` for ``columns``; raise RequestError if a required column is missing."""
    matches = _match_columns(name, columns)
    if missing := [field for field in REQUIRED[name] if field not in matches]:
        raise RequestError(
            f"data.format {name} needs the field {' and '.join(missing)}; the rows have {', '.join(columns)}"
        )
    return _add_optional_fields(name, matches, columns)


def _find_by_other_names(columns: Sequence[str], first_rows: Sequence[Row], layouts: Sequence[str]) -> RowLayout | None:
    for name in ("preference", "messages", "question_answer", "text"):
        if name not in layouts:
            continue
        matches = _match_columns(name, columns)
        if not {*REQUIRED[name]} <= {*matches} or not _are_filled(
            first_rows, [matches[field] for field in REQUIRED[name]]
        ):
            continue
        if name == "messages" and not any(_is_turns(row.get(matches["messages"])) for row in first_rows):
            continue
        if name == "text" and any(
            _find_column(names, columns) for names in (_QUESTION_NAMES[:-2], (*_ANSWER_NAMES, *_SUMMARIES))
        ):
            return None  # one half of a question and answer
        if name == "question_answer" and matches["question"].lower() == "instruction" and "instruction" in layouts:
            matches = {"instruction": matches["question"], "output": matches["answer"]}
            name = "instruction"
        return _add_optional_fields(name, matches, columns)
    return None


def _match_columns(name: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the columns found for the required fields of a layout, each column for one field."""
    matches: dict[str, str] = {}
    for field in REQUIRED[name]:
        unmatched_columns = [column for column in columns if column not in matches.values()]
        if column := _find_column((field, *_OTHER_NAMES.get(field, ())), unmatched_columns):
            matches[field] = column
    return matches


def _add_optional_fields(name: str, matches: Mapping[str, str], columns: Sequence[str]) -> RowLayout:
    fields = dict(matches)
    taken_columns = set(matches.values())
    for field in (*_OPTIONAL.get(name, ()), *(() if name in PLAIN else _OF_CONVERSATIONS)):
        column = _find_column(
            (field, *_OTHER_NAMES.get(field, ())), [column for column in columns if column not in taken_columns]
        )
        if column or field in taken_columns:
            fields[field] = column or ""
            taken_columns.add(fields[field])
    return RowLayout(name, fields)


def _find_column(names: Sequence[str], columns: Sequence[str]) -> str | None:
    """Return the column with the first of ``names``; an exact match is preferred to one that ignores case."""
    lower = {column.lower(): column for column in reversed(columns)}
    return next((name if name in columns else lower[name] for name in names if name in lower), None)


def _are_filled(rows: Sequence[Row], columns: Sequence[str]) -> bool:
    return not rows or any(all(row.get(column) is not None for column in columns) for row in rows)


def _is_turns(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip()[:1] == "[" and value.lstrip("[ \t\r\n")[:1] == "{"
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))
