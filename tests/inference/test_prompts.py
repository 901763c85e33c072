"""What rows ask, and the tokens they are asked in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.rows.chat_encoding import encode_messages
from trainwright.errors import RequestError
from trainwright.inference.prompts import PromptEncoder, read_questions
from trainwright.models.tokenization import build_bytes_tokenizer


def written(directory: Path, *rows: Any) -> str:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"question": "q"}, [user("q")]),
        ({"question": "q", "answer": "a"}, [user("q")]),
        ({"prompt": "p"}, [user("p")]),
        ({"prompt": "p", "completion": ""}, [user("p")]),
        ({"instruction": "i", "input": "x"}, [user("i\n\nx")]),
        ({"system": "s", "question": "q"}, [{"role": "system", "content": "s"}, user("q")]),
        ({"messages": [user("a"), assistant("b"), user("c")]}, [user("a"), assistant("b"), user("c")]),
        ({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}, [user("a"), assistant("b"), user("c")]),
        ({"conversations": [{"from": "human", "value": "h"}]}, [user("h")]),
        ({"prompt": [user("a")]}, [user("a")]),
        ({"text": "Once upon"}, "Once upon"),
        ({"question": "q", "context": "c"}, [user("q\n\nc")]),
        ({"instruction": "i", "context": "c", "response": "r"}, [user("i\n\nc")]),
        ({"system_prompt": "s", "query": "q"}, [{"role": "system", "content": "s"}, user("q")]),
        ({"input": "q"}, [user("q")]),
    ],
)
def test_a_row_asks_with_its_answer_and_without(tmp_path: Path, row: dict[str, Any], asked: Any) -> None:
    (found,) = read_questions(written(tmp_path, row), "--file").questions
    assert found == asked


def test_every_line_of_a_text_file_that_is_not_empty_is_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffWhat is it?\r\n\r\n  \r\nWho?\nA line\u2028of one prompt\n\nLast".encode())
    found = read_questions(str(file), "--file")
    prompts = ["What is it?", "Who?", "A line\u2028of one prompt", "Last"]
    assert found.rows == [{"prompt": prompt} for prompt in prompts]
    assert found.questions == [[user(prompt)] for prompt in prompts]
    assert found.locations == [f"{file}:{line}" for line in (1, 4, 5, 7)]


def test_a_text_file_without_prompts_or_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    for content, message in (
        (b"\n  \n", f"--file: {file} has no prompts"),
        (b"fine\n\xff\n", f"{file}:2: not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(RequestError, match=message):
            read_questions(str(file), "--file")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"color": "red"}, "no prompt: the row has color"),
        ({"question": "  "}, "the field question is empty"),
        ({"messages": [user("a"), {"role": "tool", "content": "b"}]}, "out of order: turn 1 is tool after user"),
        ({"messages": [{"role": "pirate", "content": "a"}]}, "the unknown role 'pirate'"),
        ({"messages": []}, "an empty list"),
    ],
)
def test_a_row_that_is_wrong_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    file = written(tmp_path, {"question": "fine"}, row)
    with pytest.raises(RequestError, match=reason) as raised:
        read_questions(file, "--file")
    assert str(raised.value).startswith(f"--file: {file}:2: ")


def test_a_prompt_is_what_training_sees_up_to_the_answer() -> None:
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}" + tokenizer.chat_template
    conversation = [user("a"), assistant("b"), user("Hi")]
    ids, targets = encode_messages(tokenizer, [*conversation, assistant("Hello")])
    start = len(targets) - targets[::-1].index(True)
    while targets[start - 1]:
        start -= 1
    asked = PromptEncoder(tokenizer, plain=False)(conversation)
    assert asked == ids[:start]
    assert tokenizer.decode(asked).startswith("Today: 26 Jul 2024\n<|im_start|>user\na<|im_end|>")


def test_a_plain_text_is_continued_as_it_is() -> None:
    encode = PromptEncoder(build_bytes_tokenizer(), plain=True)
    assert encode("Hi") == list(b"Hi") == encode([user("Hi")])


def test_a_system_turn_opens_conversations_that_have_none() -> None:
    encode = PromptEncoder(build_bytes_tokenizer(), plain=False, system="Be brief.")
    assert "Be brief." in build_bytes_tokenizer().decode(encode([user("Hi")]))
    own = encode([{"role": "system", "content": "Own."}, user("Hi")])
    assert "Be brief." not in build_bytes_tokenizer().decode(own)


def test_a_template_that_refuses_a_conversation_is_named() -> None:
    tokenizer = build_bytes_tokenizer()
    refuses = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    with pytest.raises(RequestError, match="rejects the conversation: not that"):
        PromptEncoder(tokenizer, plain=False)([user("no")])
