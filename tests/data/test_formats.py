from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trainwright.data.rows.formats import NoTarget, to_example
from trainwright.data.rows.layouts import RowLayout, check_format, choose_layout, detect_format
from trainwright.data.sources.reading import join_text_content
from trainwright.errors import RequestError
from trainwright.recipe.sections.data import RowSettings

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
    with pytest.raises(
        RequestError, match=r"fields title, body, which match no known layout .*question_answer: question and answer"
    ):
        detect_format(["title", "body"])


def test_a_layout_asked_for_needs_its_fields() -> None:
    check_format(["question", "answer", "more"], "question_answer")
    with pytest.raises(RequestError, match="instruction needs the field output; the rows have instruction, color"):
        check_format(["instruction", "color"], "instruction")


def test_the_layout_asked_for_is_taken_and_auto_is_found() -> None:
    row = {"question": "Q", "answer": "A", "text": "T"}
    assert choose_layout(list(row), [row], RowSettings()) == "question_answer"
    assert choose_layout(list(row), [row], RowSettings("text")) == "text"
    with pytest.raises(RequestError, match=r"data\.format messages needs the field messages"):
        choose_layout(list(row), [row], RowSettings("messages"))


def test_columns_that_are_not_used() -> None:
    assert RowLayout("question_answer").unused(["question", "answer", "system", "id"]) == ["id"]
    assert RowLayout("text").unused(["text", "system"]) == ["system"]


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        (
            "question_answer",
            {"question": "Q", "answer": None, "id": 1},
            "field answer is missing; it has question, id",
        ),
        ("question_answer", {"question": " \n", "answer": "A"}, "field question is empty"),
        ("question_answer", {"question": "Q", "answer": 4}, "field answer should be text, not a number"),
        (
            "instruction",
            {"instruction": "I", "input": 3, "output": "O"},
            "field input should be text, not a number",
        ),
        ("messages", {"messages": []}, "messages should be a list of turns, not an empty list"),
        ("messages", {"messages": "Hi"}, "messages should be a list of turns, not text"),
        ("messages", {"messages": ["Hi"]}, r"messages\[0\] should be an object"),
        (
            "messages",
            {"messages": [USER, {"role": "assistant", "text": "x"}]},
            r"\[1\] has no content .*it has role, text",
        ),
        ("messages", {"messages": [{"content": "x"}]}, r"\[0\] has no role"),
        ("messages", {"messages": [{**USER, "content": ""}, BOT]}, r"\[0\], a user turn, is empty"),
        (
            "messages",
            {"messages": [{**USER, "role": "narrator"}]},
            "the unknown role 'narrator'; choose from system, user",
        ),
        (
            "messages",
            {"messages": [USER, BOT, {"role": "system", "content": "S"}]},
            "turn 2 is system after assistant",
        ),
        ("messages", {"messages": [USER, BOT, {**BOT, "target": False}]}, "turn 2 is assistant after assistant"),
        ("messages", {"messages": [USER, {**BOT, "tool_calls": [{"id": 1}]}]}, r"tool_calls\[0\] has no name"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        (
            "prompt_completion",
            {"prompt": "Hi", "completion": [BOT]},
            "completion should be text, not a list",
        ),
    ],
)
def test_rows_that_are_wrong(layout: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        to_example(row, layout)


EMPTY, UNASKED = "the answer is empty", "no assistant turn follows a user turn"
MARKED = "every assistant turn is marked as not trained on"


@pytest.mark.parametrize(
    ("layout", "row", "why"),
    [
        ("question_answer", {"question": "Q", "answer": " \n"}, EMPTY),
        ("instruction", {"instruction": "I", "output": ""}, EMPTY),
        ("prompt_completion", {"prompt": "P", "completion": ""}, EMPTY),
        ("prompt_completion", {"prompt": [*PAIR, USER], "completion": [{**BOT, "content": " "}]}, EMPTY),
        ("messages", {"messages": [USER, {**BOT, "content": ""}]}, EMPTY),
        ("conversations", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": ""}]}, EMPTY),
        ("text", {"text": "\n"}, "the text is empty"),
        ("messages", {"messages": [USER]}, UNASKED),
        ("messages", {"messages": [BOT]}, UNASKED),
        ("messages", {"messages": [BOT, USER]}, UNASKED),
        ("messages", {"messages": [{"role": "system", "content": "S"}]}, UNASKED),
        ("prompt_completion", {"prompt": [USER, BOT], "completion": [USER]}, UNASKED),
        ("messages", {"messages": [USER, {**BOT, "weight": 0}]}, MARKED),
        ("messages", {"messages": [USER, {**BOT, "target": False}, USER, {**BOT, "train": False}]}, MARKED),
    ],
)
def test_rows_with_nothing_to_train_on(layout: str, row: dict[str, Any], why: str) -> None:
    with pytest.raises(NoTarget) as reason:
        to_example(row, layout)
    assert str(reason.value) == why


def test_an_empty_turn_among_others_is_not_trained_on() -> None:
    remarks = Counter[str]()
    silent = {**BOT, "content": ""}
    assert to_example({"messages": [USER, silent, USER, BOT]}, "messages", remarks) == [
        USER,
        {**silent, "target": False},
        USER,
        BOT,
    ]
    assert to_example({"messages": PAIR}, "messages", remarks) == PAIR
    assert remarks == {"have an empty assistant turn among others; it is not trained on": 1}


@pytest.mark.parametrize("system", [[], [{"from": "system", "value": "S"}]])
def test_a_conversation_that_begins_with_the_assistant_begins_with_the_user(system: list[Any]) -> None:
    remarks = Counter[str]()
    gpt, human = {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Hi"}
    row = {"conversations": [*system, gpt, gpt, human, gpt]}
    found = to_example(row, "conversations", remarks)
    assert found == [*({"role": "system", "content": "S"} for _ in system), *PAIR]
    assert remarks == {"begin with assistant turns, which are removed up to the first user turn": 1}


def test_lists_of_text_parts_become_text_where_turns_are() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    image = [{"type": "image"}]
    row = {"messages": [USER, {**BOT, "content": parts}], "tags": [{"content": parts}], "n": 1}
    assert join_text_content(row) == {**row, "messages": PAIR}
    assert join_text_content({"messages": [{"role": "user", "content": image}]})["messages"][0]["content"] == image
    assert join_text_content({"conversations": [{"from": "gpt", "value": parts}, "odd"]}) == {
        "conversations": [{"from": "gpt", "value": "Hello"}, "odd"]
    }
