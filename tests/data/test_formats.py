from __future__ import annotations

from typing import Any

import pytest

from trainwright.data.formats import check_format, detect_format, to_example, unused_columns
from trainwright.errors import RequestError

USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
PAIR = [USER, BOT]

ROWS: list[tuple[str, dict[str, Any], Any]] = [
    ("messages", {"messages": PAIR}, PAIR),
    (
        "messages",
        {"messages": [{"role": "system", "content": ""}, *PAIR]},
        [{"role": "system", "content": ""}, *PAIR],
    ),
    ("messages", {"messages": [{**USER, "name": None, "tool_calls": None}, BOT]}, PAIR),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, BOT]}, PAIR),
    (
        "conversations",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        PAIR,
    ),
    ("prompt_completion", {"prompt": "Hi", "completion": "Hello"}, PAIR),
    (
        "prompt_completion",
        {"prompt": [*PAIR, USER], "completion": [BOT]},
        [USER, {**BOT, "target": False}, USER, BOT],
    ),
    ("instruction", {"instruction": "Hi", "input": "", "output": "Hello"}, PAIR),
    ("instruction", {"instruction": "Hi", "output": "Hello"}, PAIR),
    (
        "instruction",
        {"instruction": "Add", "input": "1 2", "output": "3"},
        [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    ("question_answer", {"question": "Hi", "answer": "Hello"}, PAIR),
    (
        "question_answer",
        {"system": "Be nice.", "question": "Hi", "answer": "Hello"},
        [{"role": "system", "content": "Be nice."}, *PAIR],
    ),
    ("text", {"text": " as it is\n"}, " as it is\n"),
]


@pytest.mark.parametrize(("layout", "row", "example"), ROWS)
def test_each_layout_is_found_and_read(layout: str, row: dict[str, Any], example: Any) -> None:
    assert detect_format(list(row), [row]) == layout
    assert to_example(row, layout) == example


def test_a_column_that_is_never_filled_is_no_layout() -> None:
    rows = [{"messages": None, "question": "Q", "answer": "A"}]
    assert detect_format(list(rows[0]), rows) == "question_answer"


def test_the_more_telling_layout_wins() -> None:
    assert detect_format(["prompt", "messages", "text"]) == "messages"


def test_no_layout_lists_the_fields_there_are() -> None:
    with pytest.raises(RequestError, match=r"fields title, body, which is none .*question_answer: question and answer"):
        detect_format(["title", "body"])


def test_a_layout_asked_for_needs_its_fields() -> None:
    check_format(["question", "answer", "more"], "question_answer")
    with pytest.raises(RequestError, match="instruction needs the field output; the rows have instruction, answer"):
        check_format(["instruction", "answer"], "instruction")


def test_columns_that_are_not_used() -> None:
    assert unused_columns(["question", "answer", "system", "id"], "question_answer") == ["id"]
    assert unused_columns(["text", "system"], "text") == ["system"]


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        (
            "question_answer",
            {"question": "Q", "answer": None, "id": 1},
            "field answer is missing; it has question, id",
        ),
        ("question_answer", {"question": "Q", "answer": " \n"}, "field answer is empty"),
        ("question_answer", {"question": "Q", "answer": 4}, "field answer should be text and is a number"),
        (
            "instruction",
            {"instruction": "I", "input": 3, "output": "O"},
            "field input should be text and is a number",
        ),
        ("text", {"text": ""}, "field text is empty"),
        ("messages", {"messages": []}, "messages should be a list of turns and is an empty list"),
        ("messages", {"messages": "Hi"}, "messages should be a list of turns and is text"),
        ("messages", {"messages": ["Hi"]}, r"messages\[0\] should be an object"),
        (
            "messages",
            {"messages": [USER, {"role": "assistant", "text": "x"}]},
            r"\[1\] has no content .*it has role, text",
        ),
        ("messages", {"messages": [{"content": "x"}]}, r"\[0\] has no role"),
        (
            "messages",
            {"messages": [USER, {**BOT, "content": ""}]},
            r"\[1\], a turn of the assistant, is empty",
        ),
        (
            "messages",
            {"messages": [{**USER, "role": "narrator"}]},
            "the role 'narrator'; known are system, user",
        ),
        ("messages", {"messages": [USER, USER, BOT]}, "turn 1 is user after user"),
        ("messages", {"messages": [BOT, USER]}, "turn 0 is assistant at the beginning"),
        (
            "messages",
            {"messages": [USER, BOT, {"role": "system", "content": "S"}]},
            "turn 2 is system after assistant",
        ),
        ("messages", {"messages": [USER, BOT, BOT]}, "turn 2 is assistant after assistant"),
        ("messages", {"messages": [USER, {**BOT, "tool_calls": [{"id": 1}]}]}, "has tool_calls"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no text"),
        (
            "prompt_completion",
            {"prompt": "Hi", "completion": [BOT]},
            "completion should be text and is a list",
        ),
    ],
)
def test_rows_that_are_wrong(layout: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        to_example(row, layout)
