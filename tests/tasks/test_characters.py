"""Conversations in the tokens of a text's characters: all of a conversation has tokens, or it is refused."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from tests.support.commands import trainwright

MODEL = {"config": {"model_type": "gpt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"question": f"say {letter}", "answer": f"the {letter}"} for letter in "cdefgh" * 4]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "task": "sft",
        "model": {**MODEL, "tokenizer": "characters:text.txt"},
        "data": {"train": "rows.jsonl", "validation": 4, "max_length": 64},
        "train": {"max_steps": 1, "global_batch_size": 4},
        "parallel": {"num_processes": 1},
        "evaluate": {"prompts": ["say c"], "max_new_tokens": 4},
        "logging": {"run_directory": "run"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return tmp_path


@pytest.mark.slow
def test_characters_of_another_text_answer_questions(folder: Path) -> None:
    letters = set(string.ascii_letters) - {"b"}  # not all that a probe of the template would hold
    (folder / "text.txt").write_text("".join(sorted(letters | {":", " ", "\n"})))
    ask = ("generate", "run", "--prompt", "say d", "--max-new-tokens", "4")
    measure = (
        "eval",
        "run",
        "--data",
        "rows.jsonl",
        "--metrics",
        "rouge_l",
        "--max-new-tokens",
        "4",
        "--out",
        "measured",
    )
    for command in (("train", "recipe.yaml"), ask, measure):
        ended = trainwright(*command, cwd=folder, TRAINWRIGHT_CACHE=str(folder / "cache"))
        assert ended.returncode == 0, ended.stderr
    refused = trainwright("generate", "run", "--prompt", "bad", cwd=folder)
    assert refused.returncode == 2 and "no token for 'b'" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "prompts", "message"),
    [
        # Dropped, they would shift the targets of the row, here beyond its end.
        ("UAser:\n", "[]", "data.train: rows.jsonl:1: the tokenizer has no token for"),
        ("g", "[]", "data.train: rows.jsonl:5: the tokenizer has no token for 'g'"),
        ("!", "[say!]", "evaluate.prompts: the tokenizer has no token for '!'"),
    ],
)
def test_characters_that_the_text_lacks_are_refused_where_they_are(
    folder: Path, missing: str, prompts: str, message: str
) -> None:
    (folder / "text.txt").write_text("".join(sorted(set(string.ascii_letters + ": \n") - set(missing))))
    command = ("train", "recipe.yaml", f"evaluate.prompts={prompts}", "evaluate.every=null")
    ended = trainwright(*command, cwd=folder, TRAINWRIGHT_CACHE=str(folder / "cache"))
    assert ended.returncode == 2 and message in ended.stderr, ended.stderr
    assert "characters:FILE of a text that has it" in ended.stderr
