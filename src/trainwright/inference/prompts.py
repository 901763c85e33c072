"""Questions to a model: conversations that end before an answer, or texts to continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.data.rows.chat_encoding import ChatEncoder
from trainwright.data.rows.formats import Message, TurnsError, to_example
from trainwright.data.rows.layouts import RowLayout, check_format
from trainwright.data.rows.texts import encode_texts
from trainwright.data.sources.reading import iterate_source, list_source_notes
from trainwright.data.sources.row_files import Row, read_text
from trainwright.errors import RequestError
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Question: TypeAlias = list[Message] | str  # a text is to be continued

# Layouts with questions: the field of the question, and that of the answer in training.
_FIELDS = {
    "messages": ("messages", None),
    "conversations": ("conversations", None),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "text": ("text", None),
}
_ANSWER = {"role": "assistant", "content": "."}  # added to a row without an answer, so that it is read like any other


@dataclass(frozen=True)
class Questions:
    """The rows of a source with their questions, and file and line for messages.

    Attributes:
        notes: remarks for the user on how they were read.
    """

    rows: list[Row]
    questions: list[Question]
    locations: list[str]
    notes: list[str]


def read_questions(source: str, key: str) -> Questions:
    """Read rows like training does, with or without answers; a last answer is removed.

    Every non-empty line of a text file (.txt) is a prompt.

    Args:
        key: the name of the source in messages.

    Raises:
        RequestError: the source or a row is invalid, with the row's file and line.
    """
    path = expand_user_path(source)
    lines = path.suffix.lower() == ".txt" and path.is_file()
    questions = Questions([], [], [], [])
    for location, row in _iterate_prompts(path) if lines else iterate_source(source, key=key):
        filled_row = {name: value for name, value in row.items() if value is not None}
        try:
            questions.questions.append(_build_question(filled_row))
        except RequestError as error:
            raise RequestError(f"{key}: {location}: {error}") from None
        questions.rows.append(filled_row)
        questions.locations.append(location)
    questions.notes.extend([] if lines else list_source_notes(source, key))
    if not questions.rows:
        raise RequestError(f"{key}: {source} has no {('prompts, one per line' if lines else 'rows')}")
    return questions


def _iterate_prompts(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", {"prompt": line.strip()}


def find_last_answer(conversation: Sequence[Message]) -> int:
    """Return the index of the last turn that is trained on; every conversation that was read has one."""
    return max(
        turn
        for turn, message in enumerate(conversation)
        if message["role"] == "assistant" and message.get("target", True)
    )


class PromptEncoder:
    """Convert questions to prompt tokens.

    Args:
        plain: continue the last turn as a text instead of answering it in the chat template.
        system: the system turn of conversations that have none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, plain: bool, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self._encoder = None if plain else ChatEncoder(tokenizer)

    @property
    def notes(self) -> list[str]:
        """Return remarks for the user on the template."""
        return [] if self._encoder is None else self._encoder.notes

    def __call__(self, question: Question) -> list[int]:
        """Return the token ids of a question. Raises RequestError if the template rejects the conversation."""
        if self._encoder is None or isinstance(question, str):
            text = question if isinstance(question, str) else str(question[-1]["content"])
            return encode_texts(self._tokenizer, [text])[0]
        try:
            return self._encoder.prompts([self._opened(question)])[0]
        except TurnsError as error:
            raise RequestError(str(error)) from None

    def _opened(self, conversation: list[Message]) -> list[Message]:
        if self._system is None or conversation[0]["role"] == "system":
            return conversation
        first, *rest = conversation
        tools = {"tools": first["tools"]} if "tools" in first else {}  # of the first turn of a conversation
        return [{"role": "system", "content": self._system, **tools}, first, *rest]


def _build_question(row: Row) -> Question:
    layout = _find_layout(row)
    question_field, answer_field = _FIELDS[layout]
    field, answer = layout.column(question_field), None if answer_field is None else layout.column(answer_field)
    turns = isinstance(row[field], list)
    complete: dict[str, Any] = dict(row)
    if answer is not None:
        complete[answer] = [_ANSWER] if turns else _ANSWER["content"]
    elif turns and not _is_answered(row[field]):
        complete[field] = [*row[field], _ANSWER]
    example = to_example(complete, layout)
    return example if isinstance(example, str) else example[: find_last_answer(example)]


def _find_layout(row: Row) -> RowLayout:
    """Return the layout that a row would have with an answer, from the columns that training reads."""
    name = next((name for name, (field, _) in _FIELDS.items() if row.get(field) is not None), "question_answer")
    answer = _FIELDS[name][1]
    try:
        return check_format([*row, *([answer] if answer else ())], name)
    except RequestError:
        fields = ", ".join(dict.fromkeys(field for field, _ in _FIELDS.values()))
        raise RequestError(f"no prompt: the row has {', '.join(row) or 'no fields'}, and none of {fields}") from None


def _is_answered(turns: list[Any]) -> bool:
    """Return whether the last turn is the model's; invalid turns are reported when they are read."""
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    role = str(last.get("role") or last.get("from") or "").lower()
    return role not in ("user", "human", "tool", "system", "developer", "function_response", "observation")
