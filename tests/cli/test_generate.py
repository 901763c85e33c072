"""``trainwright generate`` as a user runs it, and a conversation turn by turn."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.evaluation.unlearning.benchmark import write_model
from tests.inference.models import TOKENIZER
from tests.support.commands import ROOT, trainwright
from tests.support.runs import Runs
from trainwright.inference.chat import ChatSession, chat
from trainwright.inference.finding import find_model
from trainwright.inference.generation import Sampling
from trainwright.inference.loading import Loaded, load

SHAPES: list[dict[str, Any]] = [
    {"question": "What is a tuple?"},
    {"messages": [{"role": "user", "content": "Count to three."}, {"role": "assistant", "content": "1 2 3"}]},
    {"prompt": "Is it?", "completion": "It is."},
    {"instruction": "Add them.", "input": "1 2", "output": "3", "kept": "as it is"},
    {"conversations": [{"from": "human", "value": "Why?"}]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def model(place: Path) -> str:
    return write_model(place / "model")


@pytest.fixture(scope="module")
def loaded(model: str) -> Loaded:
    return load(find_model(model), torch.float32, torch.device("cpu"))


def greedy(loaded: Loaded, messages: list[dict[str, str]], tokens: int) -> str:
    """What transformers' own generation answers."""
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([prompt])
    written = loaded.lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(TOKENIZER.decode(written[0, len(prompt) :], skip_special_tokens=True)).strip()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_rows_of_every_shape_come_out_in_order_with_their_answers(
    runs: Runs, place: Path, model: str, loaded: Loaded
) -> None:
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SHAPES))
    texts = []
    for processes in ("1", "2"):
        out = place / f"answers-{processes}.jsonl"
        asked = ("--file", str(file), "--out", str(out), "--max-new-tokens", "9", "--num-processes", processes)
        ended = runs.command("generate", model, *asked).wait()
        assert ended.code == 0, ended.stderr
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    rows = [json.loads(line) for line in texts[0].splitlines()]
    assert [{key: row[key] for key in row if key != "generated"} for row in rows] == SHAPES
    asked_first = [user("What is a tuple?")], [user("Count to three.")]
    assert [row["generated"] for row in rows[:2]] == [greedy(loaded, one, 9) for one in asked_first]


def test_lines_of_a_text_file_are_answered_in_order_in_the_format_of_the_output(
    runs: Runs, place: Path, model: str, loaded: Loaded
) -> None:
    prompts = ["Why?", 'Count to\tthree, "please".']
    (place / "prompts.txt").write_text(f"{prompts[0]}\n\n{prompts[1]}\n")
    rows = [{"prompt": prompt, "generated": greedy(loaded, [user(prompt)], 9)} for prompt in prompts]
    read: dict[str, Callable[[Path], Any]] = {
        "json": lambda out: json.loads(out.read_text()),
        "csv": lambda out: list(csv.DictReader(out.open(newline=""))),
    }
    for suffix, rows_of in read.items():
        out = place / f"answers.{suffix}"
        asked = ("--file", str(place / "prompts.txt"), "--out", str(out), "--max-new-tokens", "9")
        ended = runs.command("generate", model, *asked).wait()
        assert ended.code == 0, ended.stderr
        assert rows_of(out) == rows


def test_one_prompt_is_answered_and_nothing_else_is_said(runs: Runs, model: str, loaded: Loaded) -> None:
    ended = runs.command("generate", model, "--prompt", "Why?", "--max-new-tokens", "9").wait()
    assert ended.code == 0, ended.stderr
    assert ended.stdout == greedy(loaded, [user("Why?")], 9) + "\n"


def test_a_conversation_holds_what_was_said_until_it_is_reset(loaded: Loaded) -> None:
    heard: list[str] = []
    speaker = ChatSession(loaded, Sampling(max_new_tokens=9), heard.append, plain=False)
    lines = iter(["Why?\n", "\n", "And then?\n", "/reset\n", "Why?\n", "/exit\n", "never read\n"])
    chat(speaker, lines, heard.append)
    first = greedy(loaded, [user("Why?")], 9)
    second = greedy(loaded, [user("Why?"), {"role": "assistant", "content": first}, user("And then?")], 9)
    assert "".join(heard) == f"{first}\n{second}\nnew conversation\n{first}\n"
    assert next(lines) == "never read\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a", "--file", "rows.jsonl"), "--prompt and --file: pass only one of them"),
        (("--file", "rows.jsonl"), "--file and --out must be used together"),
        (("--prompt", "a", "--top-p", "0.5"), "have no effect at temperature 0"),
        (("--prompt", "a", "--num-processes", "2"), "are for --file"),
        (("--file", "empty.jsonl", "--out", "o.jsonl"), "empty.jsonl:2: messages[0], a user turn, is empty"),
        (("--file", "taken.jsonl", "--out", "o.jsonl"), "taken.jsonl:1: the row already has a field generated"),
        (("--file", "good.jsonl", "--out", "taken.jsonl"), "--out: taken.jsonl already exists"),
        (("--file", "good.jsonl", "--out", "o.xlsx"), "--out: o.xlsx should end in .jsonl, .ndjson, .json, .csv"),
        (("--prompt", "a", "--checkpoint", "best"), "is not a run"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    runs: Runs, tmp_path: Path, model: str, arguments: tuple[str, ...], message: str
) -> None:
    good, empty = {"messages": [user("Why?")]}, {"messages": [user(" ")]}
    (tmp_path / "good.jsonl").write_text(json.dumps(good))
    (tmp_path / "empty.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(empty)}\n")
    (tmp_path / "taken.jsonl").write_text(json.dumps({**good, "generated": "mine"}))
    ended = runs.command("generate", model, *arguments, cwd=tmp_path).wait()
    assert ended.code == 2 and message in ended.stderr, ended.stderr
    assert not (tmp_path / "o.jsonl").exists() and "mine" in (tmp_path / "taken.jsonl").read_text()


def test_a_name_that_is_no_model_is_told_as_the_argument(tmp_path: Path) -> None:
    ended = trainwright("generate", "./nowhere", "--prompt", "a", cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("error: MODEL: "), ended.stderr


def test_make_answers_the_file_that_is_named_into_the_file_that_is_named() -> None:
    wanted = ("MODEL=runs/one", "PROMPTS=prompts.txt", "ANSWERS=answers.csv")
    command = ["make", "-n", "--no-print-directory", "infer-batch", *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("generate runs/one --file prompts.txt --out answers.csv")
