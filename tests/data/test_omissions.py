"""What a chat template leaves out is counted, with the settings that keep it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.data.test_templates import CHATML, DEEPSEEK, IM, LLAMA_3, QWEN_3, byte_level, said
from trainwright.data.check import EncodingCheck, check_rows
from trainwright.data.rows.chat_encoding import ChatEncoder
from trainwright.data.rows.chat_templates import list_arguments, set_defaults
from trainwright.data.rows.formats import EXAMPLES, to_example
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.recipe.sections.data import DataSection, RowSettings

KEEPING = QWEN_3.replace(
    "loop.index0 > ns.last", "loop.index0 > ns.last or (keep_thinking is defined and keep_thinking)"
)
# As in gpt-oss: reasoning in a channel of its own, under its own name, and a tool turn must follow a call.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking is defined and (m.tool_calls or loop.last) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>' }}"
    "{{ (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
USER, AGAIN = {"role": "user", "content": "Is 91 prime?"}, {"role": "user", "content": "And 97?"}
THOUGHT = {"role": "assistant", "content": "<think>\n7 times 13 is 91.\n</think>\n\nNo."}
LATER = {"role": "assistant", "content": "<think>\nNothing divides it.\n</think>\n\nYes."}
PLAIN = {"role": "assistant", "content": "No."}


def qwen(template: str = QWEN_3) -> PreTrainedTokenizerFast:
    return byte_level([*IM, "<think>", "</think>"], template, eos_token="<|im_end|>", name_or_path="some/qwen")


def deepseek() -> PreTrainedTokenizerFast:
    tokens = ["<|begin|>", "<|User|>", "<|Assistant|>", "<|stop|>"]
    return byte_level(tokens, DEEPSEEK, bos_token="<|begin|>", eos_token="<|stop|>", name_or_path="some/r1")


def remarks(tokenizer: PreTrainedTokenizerFast, *turns: dict[str, Any], **more: Any) -> set[str]:
    found: list[set[str]] = [set()]
    ChatEncoder(tokenizer).encode([to_example({"messages": [*turns], **more}, "messages")], found)
    return found[0]


def run(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[Any], **data: Any) -> PreparedData:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train=str(file), validation=None, **data)
    return prepare(section, tokenizer, seed=0, cache=tmp_path / "cache")


def targets(tokenizer: PreTrainedTokenizerFast, dataset: TokenDataset) -> list[str]:
    pairs = [dataset.sequence(number) for number in range(dataset.sequence_count)]
    return [tokenizer.decode(ids[flags]) for ids, flags in pairs]


def test_rows_whose_reasoning_is_dropped_are_counted_in_check_and_training(tmp_path: Path) -> None:
    rows = [{"messages": [USER, PLAIN]}, {"messages": [USER, THOUGHT]}, {"messages": [AGAIN, LATER]}]
    what = "2 rows have reasoning in assistant turns that the chat template of r1 does not write"
    opened = "3 rows have answers that do not follow '<think>\\n', with which the generation prompt of r1 ends"
    summary = run(tmp_path, deepseek(), rows).summary
    checked = check_rows(
        str(tmp_path / "a.jsonl"), EXAMPLES, RowSettings(), key="data.train", encoding=EncodingCheck(deepseek())
    )
    for lines in (summary, checked.lines(None)):
        assert any(f"{what} (first: {tmp_path}/a.jsonl:2)" in line for line in lines)
        assert any(opened in line for line in lines)
        assert any("data.accept_omissions=true" in line for line in lines)
    accepted = run(tmp_path, deepseek(), rows, accept_omissions=True).summary
    assert any(what in line for line in accepted) and not any("data.accept_omissions" in line for line in accepted)


def test_reasoning_of_earlier_turns_is_kept_by_one_example_per_turn(tmp_path: Path) -> None:
    rows = [{"messages": [USER, THOUGHT, AGAIN, LATER]}, {"messages": [USER, THOUGHT]}]
    found = run(tmp_path, qwen(), rows)
    assert any("1 row has reasoning in assistant turns" in line for line in found.summary)
    assert any("data.example_per_turn=true" in line for line in found.summary)
    each = run(tmp_path, qwen(), rows, example_per_turn=True)
    answers = [f"{turn['content']}<|im_end|>" for turn in (THOUGHT, LATER, THOUGHT)]
    assert targets(qwen(), each.train) == answers
    assert each.train.report["rows"] == 2 and each.train.report["examples"] == 3


def test_an_argument_of_the_template_that_keeps_reasoning_is_found() -> None:
    encoder = ChatEncoder(qwen(KEEPING))
    encoder.encode([[USER, THOUGHT, AGAIN, LATER]], [set()])
    assert "model.template_arguments.keep_thinking=true" in encoder.list_remedies()
    assert list_arguments(KEEPING) == ["keep_thinking"]
    kept = qwen(set_defaults(KEEPING, {"keep_thinking": True}))
    assert not remarks(kept, USER, THOUGHT, AGAIN, LATER)
    assert said(kept, [USER, THOUGHT, AGAIN, LATER])[0] == THOUGHT["content"] + "<|im_end|>"


def test_templates_that_write_everything_have_no_remarks() -> None:
    quoted = {"role": "user", "content": '  Say "Hi"\n\tto \\ them  '}
    for template in (
        CHATML,
        LLAMA_3.replace("bos_token", "''"),
        CHATML.replace("m['content']", "m['content'] | tojson"),
    ):
        assert remarks(byte_level(IM, template, eos_token="<|im_end|>"), quoted, PLAIN) == set()
    assert remarks(qwen(), USER, THOUGHT) == set()


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_is_passed_under_the_name_that_the_template_reads(key: str) -> None:
    row = to_example({"messages": [USER, {**PLAIN, key: "7 times 13"}]}, "messages")
    assert isinstance(row, list)
    channels = byte_level(["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"], CHANNELS)
    whole = "<|channel|>analysis<|message|>7 times 13<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>"
    for token in ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"):
        assert token in channels.get_vocab()
    (ids, flags), *_ = ChatEncoder(channels).encode([row])
    assert channels.decode([i for i, flag in zip(ids, flags, strict=True) if flag]) == whole
    (what,) = remarks(byte_level(IM, CHATML, eos_token="<|im_end|>"), USER, {**PLAIN, key: "7 times 13"})
    assert what.startswith("have reasoning in assistant turns")


def test_a_call_that_a_text_cannot_replace_is_a_target() -> None:
    tokens = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
    channels = byte_level(tokens, CHANNELS, eos_token="<|return|>")
    call = {"function": {"name": "divide", "arguments": {"by": 7}}}
    turns = [USER, {"role": "assistant", "thinking": "Try 7.", "tool_calls": [call]}, {"role": "tool", "content": "13"}]
    row = to_example({"messages": [*turns, PLAIN]}, "messages")
    assert isinstance(row, list)
    ((ids, flags),) = ChatEncoder(channels).encode([row])
    assert channels.decode([i for i, flag in zip(ids, flags, strict=True) if flag]) == (
        "<|channel|>analysis<|message|>Try 7.<|end|><|start|>assistant to=divide<|message|>"
        '{"by": 7}<|call|><|channel|>final<|message|>No.<|return|>'
    )


def test_content_names_and_parts_of_tools_that_are_left_out() -> None:
    first = CHATML.replace("m['content']", "m['content'].split('.')[0]")
    tokenizer = byte_level(IM, first, eos_token="<|im_end|>", name_or_path="odd")
    found = remarks(tokenizer, {**USER, "name": "Ada", "content": "One. Two."}, {"role": "assistant", "content": "Yes"})
    left_out = "that the chat template of odd does not write"
    assert found == {f"have content in user turns {left_out}", f"have a name in user turns {left_out}"}
    tools = [{"type": "function", "function": {"name": "divide", "description": "Divide two numbers"}}]
    named = byte_level(IM, "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML, name_or_path="odd")
    assert remarks(named, USER, PLAIN, tools=tools) == {f"have parts of tools {left_out}"}


def test_a_short_answer_is_not_taken_for_part_of_another_turn() -> None:
    dropping = CHATML.replace("{% for m in messages %}", "{% for m in messages if not (loop.index0 == 1) %}")
    dropping = dropping.replace("if not (loop.index0 == 1)", "if m['content'] != 'Yes'")
    question = {"role": "user", "content": "Yes or no?"}
    prompt = {"role": "assistant", "content": "Yes", "target": False}
    found = remarks(byte_level(IM, dropping, name_or_path="odd"), question, prompt, AGAIN, PLAIN)
    assert found == {"have content in assistant turns that the chat template of odd does not write"}


@pytest.mark.parametrize("content", ["Red", " Red", "\nRed", "\n\n Red"])
def test_white_space_that_a_header_token_swallows_is_not_the_header(content: str) -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokenizer = byte_level([], template, eos_token="<|end|>")
    names = ("<|user|>", "<|assistant|>", "<|end|>")
    tokenizer.add_tokens([AddedToken(name, special=True, rstrip=True, normalized=False) for name in names])
    ((ids, flags),) = ChatEncoder(tokenizer).encode([[USER, {"role": "assistant", "content": content}]])
    trained = tokenizer.decode([i for i, flag in zip(ids, flags, strict=True) if flag])
    assert trained.strip() == "Red<|end|>"
