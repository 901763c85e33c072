"""Functions of scripts as settings of a recipe: the texts are those that the functions themselves write."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.conversion import files
from tests.compatibility.conversion.test_convert import failures, of, recipe
from tests.data.test_row_settings import converted
from tests.data.test_templates import CHATML, byte_level
from trainwright.compatibility.conversion.row_functions import Unclear, find_row_settings
from trainwright.data.rows.chat_templates import resolve_template

HEAD = """\
alpaca_prompt = '''Below is a task {{1}}.

### Instruction:
{}

### Response:
{}'''
EOS_TOKEN = tokenizer.eos_token
"""
ROW = {
    "instruction": "Add 1 and 2.",
    "context": "Numbers.",
    "output": "3 {three}",
    "text": "A text of its own.",
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}],
    "dialogue": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}],
}
FUNCTIONS = {
    "a prompt of a batch": """
def write(examples):
    instructions = examples["instruction"]
    texts = []
    for instruction, output in zip(instructions, examples["output"]):
        text = alpaca_prompt.format(instruction, output) + EOS_TOKEN
        texts.append(text)
    return {"text": texts, }
""",
    "numbered and named fields": """
def write(row):
    return {"text": "{0} ({more}): {1}".format(row["instruction"], row["output"], more=row["context"]) + EOS_TOKEN}
""",
    "an f-string by index": """
def write(examples, tokenizer=None):
    texts = []
    for i in range(len(examples["instruction"])):
        text = f"### Q: {examples['instruction'][i]}\\n### A: {examples['output'][i]}"
        text += EOS_TOKEN
        texts.append(text)
    return {"text": texts}
""",
    "a text with its end": """
def write(examples):
    return {"text": [example + EOS_TOKEN for example in examples["text"]]}
""",
    "turns of ShareGPT by a loop": """
def write(row):
    messages = []
    for turn in row["dialogue"]:
        role = "user" if turn["from"] == "human" else "assistant"
        messages.append({"role": role, "content": turn["value"]})
    return {"text": tokenizer.apply_chat_template(messages, tokenize=False)}
""",
    "turns of ShareGPT by branches": """
def turns_of(dialogue):
    found = []
    for turn in dialogue:
        if turn["from"] == "human":
            found.append({"role": "user", "content": turn["value"]})
        elif turn["from"] == "gpt":
            found.append({"role": "assistant", "content": turn["value"]})
    return found
def write(examples):
    return {"text": [tokenizer.apply_chat_template(turns_of(one), tokenize=False) for one in examples["dialogue"]]}
""",
    "turns of ShareGPT by a list": """
def write(row):
    turns = [{"role": "user" if t["from"] == "human" else "assistant", "content": t["value"]} for t in row["dialogue"]]
    return {"text": tokenizer.apply_chat_template(turns, tokenize=False)}
""",
    "a function of its own": """
def rendered(row, tok, system=None):
    turns = [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row.get("output", "")}]
    return tok.apply_chat_template(turns, tokenize=False)
def write(row):
    return {"text": rendered(row, tokenizer)}
""",
    "an end after the answer": """
def write(row):
    return {"text": f"[INST] {row['instruction']} [/INST] {row['output']} </s>"}
""",
    "more after the answer": """
def write(row):
    return {"text": f"Q: {row['instruction']}\\nA: {row['output']}\\n---\\n" + EOS_TOKEN}
""",
    "turns of a column": """
def write(examples):
    convos = examples["messages"]
    texts = [tokenizer.apply_chat_template(convo, tokenize=False, add_generation_prompt=False) for convo in convos]
    return {"text": texts}
""",
    "turns of columns": """
def write(examples):
    conversations = []
    for problem, solution in zip(examples["instruction"], examples["output"]):
        conversations.append([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{problem} ({{}})"},
            {"role": "assistant", "content": solution},
        ])
    return {"text": [tokenizer.apply_chat_template(turns, tokenize=False) for turns in conversations]}
""",
}
CALL = "dataset = dataset.map(write, batched=True)\n"


def module(function: str, calls: str = CALL) -> ast.Module:
    return ast.parse(HEAD + function + calls)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_written_as_by_the_function_itself(name: str) -> None:
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>", "</s>"], CHATML, eos_token="</s>")
    script: dict[str, Any] = {"tokenizer": tokenizer}
    exec(HEAD + FUNCTIONS[name], script)
    is_batch = "examples" in FUNCTIONS[name]
    written = script["write"]({key: [value] for key, value in ROW.items()} if is_batch else ROW)["text"]
    text = written[0] if is_batch else written

    settings = find_row_settings(module(FUNCTIONS[name]))
    template = settings.pop("chat_template", None)
    columns = {key.partition(".")[2]: settings.pop(key) for key in list(settings) if key.startswith("columns.")}
    example = converted(ROW, columns=columns, **settings)
    if isinstance(example, str):
        assert text == example + "</s>"
        return
    tokenizer.chat_template = CHATML if template is None else resolve_template(template)
    assert tokenizer.apply_chat_template(example, tokenize=False) == text


def test_steps_follow_one_another() -> None:
    first = """
def turns(row):
    return {"conversations": [{"role": "user", "content": row["task"]}, {"role": "assistant", "content": row["gold"]}]}
def write(examples):
    convos = examples["conversations"]
    return {"text": [tokenizer.apply_chat_template(c, tokenize=False).removeprefix("<s>") for c in convos]}
"""
    calls = "d = load().rename_column('answer', 'gold').map(turns)\nd = d.map(write, batched=True)\n"
    assert find_row_settings(module(first, calls)) == {"prompt": "{task}", "columns.answer": "answer"}
    by_trainer = "def f(row):\n    return f\"{row['a']}: {row['b']}\"\nt = SFTTrainer(model, formatting_func=f)\n"
    wanted = {"prompt": "{a}: ", "columns.answer": "b", "chat_template": "plain"}
    assert find_row_settings(ast.parse(by_trainer)) == wanted
    assert find_row_settings(ast.parse("d = d.map(lambda row: {'messages': row['dialogue']})")) == {
        "columns.messages": "dialogue"
    }


def test_the_beginning_of_a_text_and_the_turns_of_pairs() -> None:
    text = "def write(row):\n    return {'text': f\"{tokenizer.bos_token}{row['a']}{tokenizer.eos_token}\"}\n"
    assert find_row_settings(module(text)) == {"format": "text", "columns.text": "a"}
    pairs = """
def write(row):
    return {
        "prompt": [{"role": "user", "content": row["question"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["bad"]}],
    }
"""
    columns = {"columns.prompt": "question", "columns.chosen": "chosen", "columns.rejected": "bad"}
    assert find_row_settings(module(pairs)) == columns
    with pytest.raises(Unclear):
        find_row_settings(module(pairs.replace('"user"', '"system"')))


@pytest.mark.parametrize(
    "body",
    [
        "return {'text': row['a'].upper()}",
        "return {'text': row['a'] if row['b'] else row['c']}",
        "return {'text': row['messages'][0]['content']}",
        "return {'text': ': ' + row['a'] + row['b'] + tokenizer.bos_token}",
        "return {'text': row['a b'] + ': ' + row['c']}",
        "return {'text': tokenizer.apply_chat_template(row['messages'], tokenize=False, add_generation_prompt=True)}",
        "text = ''\n    for part in row['parts']:\n        text += part\n    return {'text': text}",
        "row['text'] = open('ran', 'w').name\n    return row",
        "return {'text': other(row['a'])}",
        "return {'text': ''}",
        "return {'text': '{'.format(row['a'])}",
        "return {'text': '{} {}'.format(row['a'])}",
        "return {'text': str()}",
        "return write(row)",
        "m = []\n    for t in row['c']:\n        if t['from'] == 'system':\n            continue\n"
        "        m.append({'role': t['from'], 'content': t['value']})\n    return {'messages': m}",
        "m = []\n    for t in row['c']:\n        m.append({'role': t['from'], 'content': 'Say ' + t['value']})\n"
        "    return {'messages': m}",
    ],
)
def test_what_no_setting_does_is_unclear(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unclear):
        find_row_settings(ast.parse(f"def write(row):\n    {body}\nd = d.map(write)\n"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call", ["d.map(lambda: 1)", "d.rename_columns(names)", "d.rename_columns({**names})", "d.map()"]
)
def test_calls_that_only_the_script_understands_are_unclear(call: str) -> None:
    with pytest.raises(Unclear):
        find_row_settings(ast.parse(call))


def test_a_script_of_unsloth_with_a_prompt(tmp_path: Path) -> None:
    start, end = files.UNSLOTH.index("def write"), files.UNSLOTH.index("dataset = dataset.map")
    script = f"{files.UNSLOTH[:start]}{HEAD}{FUNCTIONS['a prompt of a batch']}{files.UNSLOTH[end:]}"
    script += "trainer.train()\nmodel, tokenizer = FastLanguageModel.from_pretrained('saved_adapter')\n"
    script += "if False:\n    dataset = dataset.map(lambda row: row.other())\n"
    values = recipe(of(tmp_path, script, name="unsloth.py"), tmp_path)
    assert values["data"]["prompt"] == "Below is a task {{1}}.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    assert values["data"]["columns"] == {"answer": "output"} and values["data"]["targets"] == "all"
    assert values["model"]["chat_template"] == "plain" and values["model"]["name"] == "owner/small"
    notebook = {"cells": [{"cell_type": "code", "source": ["!pip install unsloth\n", script]}]}
    assert recipe(of(tmp_path, json.dumps(notebook), name="unsloth.ipynb"), tmp_path) == values


def test_first_rows_are_a_limit_and_others_are_named(tmp_path: Path) -> None:
    def selected(range_: str) -> Any:
        text = files.UNSLOTH.replace("trainer = SFT", f"dataset = dataset.select({range_})\ntrainer = SFT")
        return of(tmp_path, text, name="unsloth.py")

    assert recipe(selected("range(500)"), tmp_path)["data"]["limit"] == 500
    (failure,) = failures(selected("range(100, 500)"))
    assert "end the source with [100:500]" in failure
    (failure,) = failures(selected("indices"))
    assert "chooses rows by what the script computes" in failure
