from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.rows.formats import parse_arguments, to_example
from trainwright.data.rows.preparing import SplitSettings, prepare_raw, style_rows
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection

# In the manner of Qwen 2.5's.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
    "{% elif m.tool_calls %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '\n<tool_call>' + c.function.name + ' ' + (c.function.arguments | tojson) }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = TEMPLATE.replace(
    "{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}",
    "{{ '<|im_start|>assistant' }}{% generation %}{% if m.content %}{{ '\n' + m.content }}{% endif %}",
).replace(
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}",
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endgeneration %}",
)
MARKED = MARKED.replace(
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def row(*calls: Any, content: Any = None) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        {"role": "tool", "name": "weather", "content": "21"},
        {"role": "assistant", "content": "It is 21."},
    ]
    return {"messages": messages, "tools": [tool("weather"), tool("clock")]}


ROWS = [
    row(call("weather", city="Rome", days=2)),
    row(call("weather", city=["a", "b"]), call("clock", zone=None), content="Let me look."),
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
]
LEARNED = [
    ['<tool_call>weather {"city": "Rome", "days": 2}</tool_call><|im_end|>', "It is 21.<|im_end|>"],
    [
        'Let me look.\n<tool_call>weather {"city": ["a", "b"]}</tool_call>\n'
        '<tool_call>clock {"zone": null}</tool_call><|im_end|>',
        "It is 21.<|im_end|>",
    ],
    ["Hello<|im_end|>"],
]


def run(tmp_path: Path, rows: list[Any], template: str | None) -> PreparedData:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    tokenizer = build_bytes_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    section = DataSection(train=str(tmp_path / "a.jsonl"), validation=None)
    return prepare(section, tokenizer, seed=0, cache=tmp_path / "cache")


def learned(found: PreparedData, index: int) -> list[str]:
    ids, targets = found.train.sequence(index)
    runs = groupby(zip(ids.tolist(), targets.tolist(), strict=True), key=lambda pair: pair[1])
    return [build_bytes_tokenizer().decode([i for i, _ in run]) for target, run in runs if target]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["found", "marked"])
def test_calls_are_learnt_as_the_template_writes_them(tmp_path: Path, template: str) -> None:
    found = run(tmp_path, ROWS, template)
    assert [[text.lstrip("\n") for text in learned(found, i)] for i in range(3)] == LEARNED
    first = build_bytes_tokenizer().decode(found.train.sequence(0)[0])
    assert first.startswith('<|im_start|>system\nTools: {"type": "function", "function": {"name": "weather"')
    assert "<tool_response>21</tool_response>" in first
    assert not build_bytes_tokenizer().decode(found.train.sequence(2)[0]).startswith("<|im_start|>system")


def test_arguments_may_be_text_and_calls_bare() -> None:
    text = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    for given in ([text], json.dumps([text]), [{"name": "weather", "arguments": {"city": "Rome"}, "id": "c1"}]):
        messages = to_example(
            {**row(), "messages": [ROWS[2]["messages"][0], {"role": "assistant", "tool_calls": given}]}, "messages"
        )
        (found,) = messages[1]["tool_calls"]
        assert (found["id"], found["function"]["name"], parse_arguments(found)) == ("c1", "weather", {"city": "Rome"})


def test_a_column_of_objects_loses_the_keys_that_other_rows_have() -> None:
    [_, message, *_] = to_example(row(call("weather", city="Rome", zone=None)), "messages")
    assert message["tool_calls"] == [call("weather", city="Rome")]


def test_prepare_and_style_keep_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    prepare_raw([str(tmp_path / "a.jsonl")], tmp_path / "out", SplitSettings(0.0, 0.0, 0, "near"), renamed={})
    style_rows(str(tmp_path / "out" / "train.jsonl"), "Be brief.", tmp_path / "b.jsonl", replace=False)
    written = json.loads((tmp_path / "b.jsonl").read_text())
    assert written["tools"] == ROWS[1]["tools"]
    assert written["messages"][2]["tool_calls"] == ROWS[1]["messages"][1]["tool_calls"]
    assert written["messages"][3]["name"] == "weather"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tool_calls": [{"function": {}}]}, r"a\.jsonl:1: messages\[1\]\.tool_calls\[0\] has no name"),
        ({"tool_calls": [{"name": "f", "arguments": "{"}]}, r"messages\[1\]\.tool_calls\[0\]\.arguments are not JSON"),
        ({"tool_calls": [{"name": "f", "arguments": [1]}]}, r"arguments should be an object, not a list"),
        ({"tool_calls": "nothing"}, r"messages\[1\]: tools and calls must be JSON"),
        ({"role": "user", "tool_calls": [call("f")]}, r"only assistant turns may have them"),
    ],
)
def test_wrong_calls_are_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    wrong = row(call("weather"))
    wrong["messages"][1] = {**wrong["messages"][1], **changed}
    with pytest.raises(RequestError, match=message):
        run(tmp_path, [wrong], TEMPLATE)


def test_a_template_that_leaves_tools_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"a\.jsonl:1: the chat template of .* does not write tools, such as weather"
    ):
        run(tmp_path, ROWS, None)
    without = {"messages": ROWS[0]["messages"]}
    with pytest.raises(RequestError, match="does not write calls of tools, such as weather"):
        run(tmp_path, [without], None)


# As DeepSeek's, whose template concatenates the arguments with text; and one that writes them as they are.
CONCATENATED = TEMPLATE.replace("(c.function.arguments | tojson)", "c.function.arguments")
WRITTEN = TEMPLATE.replace("+ ' ' + (c.function.arguments | tojson) }}", "+ ' ' }}{{ c.function.arguments }}")


@pytest.mark.parametrize("template", [TEMPLATE, CONCATENATED, WRITTEN], ids=["object", "concatenated", "written"])
def test_arguments_are_passed_as_the_template_needs_them(tmp_path: Path, template: str) -> None:
    as_text = call("weather") | {"function": {"name": "weather", "arguments": '{"city": "Rome", "zone": null}'}}
    found = run(tmp_path, [row(as_text), row(call("weather", city="Rome", zone=None))], template)
    expected = '<tool_call>weather {"city": "Rome", "zone": null}</tool_call><|im_end|>'
    assert [learned(found, index)[0].lstrip("\n") for index in range(2)] == [expected] * 2


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["found", "marked"])
def test_bare_functions_are_wrapped_for_a_template_that_reads_the_outer_object(tmp_path: Path, template: str) -> None:
    strict = template.replace("{{ t | tojson }}", "{{ t.function.name + (t.function.parameters | tojson) }}")
    rows = [ROWS[0], ROWS[0] | {"tools": [one["function"] for one in ROWS[0]["tools"]]}]
    found = run(tmp_path, rows, strict)
    ids = [found.train.sequence(index)[0].tolist() for index in range(2)]
    assert ids[0] == ids[1] and [text.lstrip("\n") for text in learned(found, 1)] == LEARNED[0]


def test_a_null_that_the_row_writes_is_kept() -> None:
    turns = [
        {"from": "human", "value": "When?"},
        {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": null}}'},
    ]
    messages = to_example({"conversations": turns}, "conversations")
    assert parse_arguments(messages[1]["tool_calls"][0]) == {"zone": None}


def test_rows_with_tools_use_the_template_for_tools(tmp_path: Path) -> None:
    tokenizer = build_bytes_tokenizer()
    plain = tokenizer.chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": TEMPLATE}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    section = DataSection(train=str(tmp_path / "a.jsonl"), validation=None)
    found = prepare(section, tokenizer, seed=0, cache=tmp_path / "cache")
    assert [[text.lstrip("\n") for text in learned(found, index)] for index in range(3)] == LEARNED


# As Mistral's v0.3: no generation prompt, a space before a text and none before a call, and the tools before the last
# question.
SPACED = (
    "{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == last %}{{ (tools | tojson) }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls %}"
    "{{ '[TOOL_CALLS] ' + (m.tool_calls[0].function | tojson) + '<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
    "{% endif %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_a_call_without_the_space_of_texts_is_located(tmp_path: Path) -> None:
    several = row(call("weather", city="Rome"))
    several["messages"] += [{"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Welcome"}]
    found = run(tmp_path, [row(call("weather", city="Rome")), several], SPACED)
    called = '[TOOL_CALLS] {"name": "weather", "arguments": {"city": "Rome"}}<|im_end|>'
    assert learned(found, 0) == [called, " It is 21.<|im_end|>"]
    assert learned(found, 1) == [called, " It is 21.<|im_end|>", " Welcome<|im_end|>"]
