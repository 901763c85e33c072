"""Columns by other names, system turns and prompts that a recipe sets, and which tokens are targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_templates import CHATML, HELLO, MORE
from trainwright.data.check import check_data
from trainwright.data.rows.chat_encoding import ChatEncoder
from trainwright.data.rows.formats import EXAMPLES
from trainwright.data.rows.pairs import PAIRS
from trainwright.data.stream.dataset_cache import prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.data import DataSection, RowSettings

ALPACA = "{instruction}\n\n### Input:\n{input}"


def converted(row: dict[str, Any], **settings: Any) -> Any:
    layout = EXAMPLES.layout(list(row), [row], RowSettings(**settings))
    ((_, example),) = EXAMPLES.sequences(row, layout)
    return example


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    body = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return body if system is None else [{"role": "system", "content": system}, *body]


def test_fields_are_read_from_the_columns_that_the_recipe_names() -> None:
    row = {"question": "not this", "frage": "What?", "antwort": "This.", "rolle": "Be brief."}
    columns = {"question": "frage", "answer": "antwort", "system": "rolle"}
    assert converted(row, columns=columns) == turns("What?", "This.", system="Be brief.")
    dialogue = {"dialogue": turns("Hello", "Hi")}
    assert converted(dialogue, columns={"messages": "dialogue"}) == turns("Hello", "Hi")
    assert converted({"body": "A text."}, columns={"text": "body"}) == "A text."


def test_columns_of_pairs_are_read_by_their_names_too() -> None:
    row = {"ask": "What?", "good": "This.", "bad": "That."}
    columns = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    layout = PAIRS.layout(list(row), [row], RowSettings(columns=columns))
    (_, chosen), (_, rejected) = PAIRS.sequences(row, layout)
    assert (chosen, rejected) == (turns("What?", "This."), turns("What?", "That."))


def test_a_system_text_begins_conversations_that_have_none() -> None:
    row = {"question": "What?", "answer": "This."}
    assert converted(row, system="Be brief.") == turns("What?", "This.", system="Be brief.")
    assert converted({**row, "system": "Be long."}, system="Be brief.") == turns("What?", "This.", system="Be long.")
    own = {"messages": turns("What?", "This.", system="")}  # an empty one turns off the default of some models
    assert converted(own, system="Be brief.")[0] == {"role": "system", "content": ""}


def test_a_prompt_is_made_from_columns_and_without_input_from_another_text() -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    settings = {"prompt": ALPACA, "prompt_without_input": "{instruction}"}
    assert converted(row, **settings) == turns("Add.\n\n### Input:\n1 and 2", "3")
    assert converted({**row, "input": " "}, **settings) == turns("Add.", "3")
    assert converted({**row, "input": None}, **settings) == turns("Add.", "3")
    pair = {"premise": "It rains.", "hypothesis": "It is wet.", "label": "yes"}
    made = converted(pair, prompt="{premise} So: {hypothesis} {{?}}", columns={"answer": "label"})
    assert made == turns("It rains. So: It is wet. {?}", "yes")
    asked = {"question": "What?", "answer": "This."}  # a column that is called as the field that the prompt replaces
    assert converted(asked, prompt="Q: {question}") == turns("Q: What?", "This.")
    renamed = converted(
        {"query": "What?", "gold": "This."}, prompt="Q: {question}", columns={"question": "query", "answer": "gold"}
    )
    assert renamed == turns("Q: What?", "This.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"query": "question"}}, "data.columns: query is no field of a layout; choose from answer, "),
        ({"columns": {"question": "nothing"}}, "the rows have no column nothing; they have question, answer"),
        ({"prompt": "{nothing}?"}, "data.prompt: the rows have no column nothing; they have question, answer"),
        ({"format": ["text", "messages"]}, "name the columns with data.columns, such as '{text: COLUMN}'"),
        ({"prompt": "{question}?", "format": "messages"}, "is for rows of a question and one answer"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_rows_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        converted({"question": "What?", "answer": "This."}, **settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt": "no fields"}, "columns in braces"),
        ({"prompt": "{a"}, "data.prompt"),
        ({"targets": "some"}, "answers, all, last or a regular expression between slashes"),
        ({"targets": "/(/"}, "a regular expression: "),
        ({"train": [{"source": "a"}, {"source": "b"}], "system": "x"}, "set system for each source of data.train"),
    ],
    ids=str,
)
def test_invalid_values_are_refused_before_any_row_is_read(data: dict[str, Any], said: str) -> None:
    from trainwright.recipe.loading import build_recipe

    values = {"train": "a.jsonl", **data}
    settings = [
        "task=sft",
        "model.name=some/model",
        *(f"data.{key}={json.dumps(value)}" for key, value in values.items()),
    ]
    with pytest.raises(RequestError) as refused:
        build_recipe(settings, "test")
    assert said in str(refused.value)


def written(encoder: ChatEncoder, conversation: list[dict[str, Any]]) -> str:
    """The text of the targets; other tokens are left out."""
    ((ids, targets),) = encoder.encode([conversation])
    return str(encoder._tokenizer.decode([token for token, trained in zip(ids, targets, strict=True) if trained]))


def test_targets_are_answers_the_last_of_them_everything_or_what_a_pattern_matches() -> None:
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = CHATML
    conversation = [*HELLO, *MORE]
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)

    def targets(value: str) -> str:
        return written(ChatEncoder(tokenizer, value), conversation)

    assert targets("answers") == "Hi there!<|im_end|>More\nlater.<|im_end|>"
    assert targets("last") == "More\nlater.<|im_end|>"
    assert targets("all") == whole
    assert targets("/then|later/") == "thenlater"
    assert targets("/assistant\\n(\\w+)/") == "HiMore"
    assert targets("/nothing/") == ""


def test_targets_of_data_are_part_of_what_is_prepared(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": turns(f"One {n}", "two", "three", "four")}) + "\n" for n in range(4))
    )
    counts = {}
    for targets in ("answers", "last", "all", "/tw(o)/"):
        data = DataSection.model_validate({"train": str(file), "validation": None, "targets": targets})
        prepared = prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache")
        counts[targets] = prepared.train.report["target_tokens"] / 4
    assert counts["answers"] == len("two") + len("four") + 2  # each with its stop
    assert counts["last"] == len("four") + 1
    assert counts["/tw(o)/"] == 1
    assert counts["all"] == prepared.train.report["tokens"] / 4 - 1  # nothing predicts the first token


def test_rows_with_nothing_that_the_pattern_matches_are_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "What?", "answer": answer} for answer in ("Result: 4", "No result.", "Result: 5")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection.model_validate({"train": str(file), "validation": None, "targets": "/Result: (\\d)/"})
    prepared = prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache")
    assert len(prepared.train) == 2
    assert any("1 row left out: no target" in line for line in prepared.summary)


def test_the_check_before_a_run_reads_rows_as_the_recipe_says(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"frage": "What?", "antwort": "This."}) + "\n")
    data = {"train": str(file), "columns": {"question": "frage", "answer": "antwort"}}
    check_data(RecipeSchema.model_validate({"task": "sft", "model": {"name": "some/model"}, "data": data}))
    with pytest.raises(RequestError, match="match no known layout"):
        check_data(
            RecipeSchema.model_validate({"task": "sft", "model": {"name": "some/model"}, "data": {"train": str(file)}})
        )
