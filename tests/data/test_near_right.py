"""Rows as published data sets have them: read, or refused with what is wrong and what would be read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.check import check_rows
from trainwright.data.rows.formats import EXAMPLES
from trainwright.data.rows.pairs import ANY, PAIRS
from trainwright.data.rows.texts import iterate_pieces
from trainwright.data.stream.dataset_cache import prepare
from trainwright.errors import RequestError
from trainwright.inference.evaluation.rows import read
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection, RowSettings, SourceSection

USER, BOT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
PAIR = [USER, BOT]
CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "3"}


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in said]


ASKED = turns(("human", "Hi"), ("function_call", json.dumps(CALL)), ("observation", "3"), ("gpt", "Hello"))


@pytest.mark.parametrize(
    ("row", "layout", "messages", "unused"),
    [
        (
            {"instruction": "Sum up.", "context": "A text.", "response": "It.", "category": "summary"},
            "instruction",
            [{"role": "user", "content": "Sum up.\n\nA text."}, {"role": "assistant", "content": "It."}],
            ["category"],
        ),
        ({"instruction": "Hi", "input": "", "response": "Hello"}, "instruction", PAIR, []),
        ({"query": "Hi", "response": "Hello"}, "question_answer", PAIR, []),
        ({"input": "Hi", "output": "Hello"}, "question_answer", PAIR, []),
        ({"Context": "Hi", "Response": "Hello"}, "question_answer", PAIR, []),
        ({"prompt": "Hi", "response": "Hello", "id": 3}, "question_answer", PAIR, ["id"]),
        (
            {"question": "What?", "context": "This.", "answer": "Hello"},
            "question_answer",
            [{"role": "user", "content": "What?\n\nThis."}, BOT],
            [],
        ),
        (
            {"system": "Be brief.", "user": "Hi", "assistant": "Hello"},
            "question_answer",
            [{"role": "system", "content": "Be brief."}, *PAIR],
            [],
        ),
        (
            {"system_prompt": "Be brief.", "question": "Hi", "response": "Hello"},
            "question_answer",
            [{"role": "system", "content": "Be brief."}, *PAIR],
            [],
        ),
        ({"prompt": [USER], "completion": "Hello"}, "prompt_completion", PAIR, []),
        ({"conversation": PAIR, "model": "m"}, "messages", PAIR, ["model"]),
        ({"messages": json.dumps(PAIR)}, "messages", PAIR, []),
        ({"dialogue": json.dumps(PAIR)}, "messages", PAIR, []),
        ({"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello"]}}, "conversations", PAIR, []),
        (
            {"messages": [{"role": "human", "value": "Hi"}, {"from": "assistant", "content": "Hello"}]},
            "messages",
            PAIR,
            [],
        ),
        ({"conversations": ASKED}, "conversations", [USER, CALLED, RESULT, BOT], []),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "function_call": CALL}, RESULT, BOT]},
            "messages",
            [USER, CALLED, RESULT, BOT],
            [],
        ),
        (
            {"messages": [USER, {**BOT, "weight": 0}, USER, {**BOT, "weight": 1}]},
            "messages",
            [USER, {**BOT, "target": False}, *PAIR],
            [],
        ),
        ({"content": "A text.", "url": "u"}, "text", "A text.", ["url"]),
    ],
)
def test_columns_and_turns_of_published_data_sets(
    row: dict[str, Any], layout: str, messages: Any, unused: list[str]
) -> None:
    found = EXAMPLES.layout(list(row), [row], RowSettings())
    assert found == layout
    assert EXAMPLES.sequences(row, found) == [(0, messages)]
    assert found.unused(list(row)) == unused


YES, NO = {"role": "assistant", "content": "Yes"}, {"role": "assistant", "content": "No"}
HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Hi"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (
            {"chosen": f"{HUMAN}\n\nAssistant: Yes", "rejected": f"{HUMAN}\n\nAssistant: No"},
            [USER, {**BOT, "target": False}, USER],
        ),
        (
            {"prompt": f"{HUMAN}\n\nAssistant:", "chosen": "Yes", "rejected": "No"},
            [USER, {**BOT, "target": False}, USER],
        ),
        ({"question": "Hi", "chosen": "Yes", "rejected": "No"}, [USER]),
        ({"question": "Hi", "response_j": "Yes", "response_k": "No"}, [USER]),
        (
            {"instruction": "Hi", "input": "there", "chosen": "Yes", "rejected": "No"},
            [{"role": "user", "content": "Hi\n\nthere"}],
        ),
        ({"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]}, [USER]),
        (
            {
                "conversations": turns(("human", "Hi")),
                "chosen": turns(("gpt", "Yes"))[0],
                "rejected": turns(("gpt", "No"))[0],
            },
            [USER],
        ),
    ],
)
def test_preferences_of_published_data_sets(row: dict[str, Any], prompt: Any) -> None:
    found = PAIRS.layout(list(row), [row], RowSettings())
    assert PAIRS.sequences(row, found) == [(0, [*prompt, YES]), (1, [*prompt, NO])]


def test_turns_of_one_role_are_joined_and_counted() -> None:
    remarks = Counter[str]()
    row = {"messages": [USER, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}, BOT]}
    found = EXAMPLES.sequences(row, EXAMPLES.layout(list(row), [row], RowSettings()), remarks)
    said = [{"role": "user", "content": "Hi\n\nWho?"}, {"role": "assistant", "content": "Me.\n\nHello"}]
    assert found == [(0, said)]
    assert remarks == {"have turns of one role one after another, which are joined with an empty line between them": 1}


def test_a_system_column_that_is_not_used_is_counted() -> None:
    remarks = Counter[str]()
    row = {"system": "Be long.", "messages": [{"role": "system", "content": "Be brief."}, *PAIR]}
    EXAMPLES.sequences(row, EXAMPLES.layout(list(row), [row], RowSettings()), remarks)
    assert remarks == {"have a separate system turn, so the column system is not used": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "Hi", "response": 42}, "the field response should be text, not a number; put it in quotes"),
        ({"instruction": "Hi", "output": None}, "the field output is missing; it has instruction: fill it in, remove"),
        (
            {"conversations": turns(("human", "Hi"), ("function_call", "add(1)"))},
            r'conversations\[1\] is a function call, whose value should be JSON such as {"name"',
        ),
        ({"messages": "[{'role': 'user'}]"}, "should be a list of turns, not text that is not JSON; write it with"),
        (
            {"messages": [USER, {**BOT, "weight": 0.5}]},
            r"messages\[1\] has weight 0\.5; expected true or false",
        ),
        ({"messages": ["Hi"]}, r'not text; a turn is {"role": "user", "content": "…"}'),
        ({"messages": "[" * 100_000}, "text that is not JSON"),
        ({"messages": PAIR, "tools": "[" * 100_000}, "tools and calls must be JSON"),
        (
            {"messages": [USER, BOT, {"role": "system", "content": "S"}]},
            "expected an optional system turn, then alternating user and",
        ),
    ],
)
def test_what_is_not_read_is_told(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EXAMPLES.sequences(row, EXAMPLES.layout(list(row), [{**row, "output": "x"}], RowSettings()))


@pytest.mark.parametrize("row", [{"instruction": "Hi", "code": "x"}, {"article": "Long.", "highlights": "Short."}])
def test_half_of_a_question_and_answer_is_no_text(row: dict[str, str]) -> None:
    with pytest.raises(
        RequestError, match=r"name the columns with data\.columns, such as '.question: COLUMN, answer: COLUMN.'"
    ):
        ANY.layout(list(row), [row], RowSettings())


def test_fields_of_turns_that_are_not_used_are_counted() -> None:
    remarks = Counter[str]()
    row = {"messages": [{**USER, "language": "en", "toxic": None}, BOT], "prompt": [{**USER, "more": 1}]}
    EXAMPLES.sequences(row, EXAMPLES.layout(list(row), [row], RowSettings()), remarks)
    assert remarks == {"have fields in their turns that are not used: language": 1}


def test_training_says_what_is_read_as_what_and_what_is_not_used(tmp_path: Path) -> None:
    rows = [{"query": f"Q{n}", "response": "A", "topic": "t"} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(train=str(tmp_path / "a.jsonl"), max_length=64)
    said = "\n".join(prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache").summary)
    assert "question_answer (detected from the first rows; query as question, response as answer)" in said
    assert "not used: the column topic; data.columns reads a column as a field" in said


def test_a_check_names_columns_that_only_later_rows_have(tmp_path: Path) -> None:
    rows = [{"question": f"Q{n}", "answer": "A"} for n in range(40)]
    rows[20] |= {"context": "C", "topic": "t"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = check_rows(str(tmp_path / "a.jsonl"), EXAMPLES, RowSettings(), key="data check").notes
    said = prepare(
        DataSection(train=str(tmp_path / "a.jsonl"), max_length=64),
        build_bytes_tokenizer(),
        seed=0,
        cache=tmp_path / "cache",
    ).summary
    assert notes == [
        "read: context as input",
        "not used: the column topic; data.columns reads a column as a field",
    ]
    assert "context as input" in said[0] and f"train: {notes[1]}" in said


def test_pretraining_says_which_columns_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": "A text.", "url": "u"}) + "\n")
    notes: list[str] = []
    source = SourceSection(source=str(tmp_path / "a.jsonl"))
    assert [piece.text for piece in iterate_pieces(source, "data.train", notes)] == ["A text."]
    assert [note.partition(": ")[2] for note in notes] == ["content as text", "not used: the column url"]


def test_rows_to_measure_on_say_what_is_read_as_what_and_what_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "Q", "response": "A", "topic": "t"}) + "\n")
    notes = read(SourceSection(source=str(tmp_path / "a.jsonl")), key="--data").notes
    assert [note.partition(": ")[2] for note in notes] == [
        "query as question, response as answer",
        "not used: the column topic",
    ]
