"""``trainwright data`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import trainwright
from tests.support.slow import slow_but
from trainwright.models.tokenization import build_bytes_tokenizer

USER, ASSISTANT = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SHAPES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ASSISTANT]},
    "conversations": {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
    "prompt_completion": {"prompt": "Why?", "completion": "So."},
    "instruction": {"instruction": "Why?", "output": "So."},
    "question_answer": {"question": "Why?", "answer": "So."},
    "text": {"text": "Why?So."},
}
CHAT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n⟦So.<|im_end|>⟧\n"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


@pytest.mark.slow
@pytest.mark.parametrize("shape", slow_but("messages", "question_answer", "text", among=SHAPES))
def test_show_marks_what_is_learnt_in_rows_of_every_shape(tmp_path: Path, shape: str) -> None:
    write(tmp_path / "rows.jsonl", [SHAPES[shape]] * 3)
    cache = str(tmp_path / "cache")
    result = trainwright(
        "data", "show", "rows.jsonl", "--model", "bytes", "-n", "1", cwd=tmp_path, TRAINWRIGHT_CACHE=cache
    )
    assert result.returncode == 0, result.stderr
    expected = "W⟦hy?So.<|im_end|>⟧\n" if shape == "text" else CHAT
    first, _, rest = result.stdout.partition("\n")
    assert first.startswith("example 1: ") and rest.startswith(expected), result.stdout
    assert f"3 rows of {shape}" in result.stdout
    tokens = 8 if shape == "text" else 28
    assert f"{tokens} - {tokens} " in result.stdout and "% full" in result.stdout


def test_show_and_check_need_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [SHAPES["messages"]] * 3)
    build_bytes_tokenizer().save_pretrained(tmp_path / "model")
    config = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64, "hidden_size": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    asked = ("rows.jsonl", "--model", "model", "--max-length", "64")
    shown = trainwright("data", "show", *asked, cwd=tmp_path, TRAINWRIGHT_CACHE=str(tmp_path / "cache"))
    assert shown.returncode == 0, shown.stderr
    assert CHAT in shown.stdout
    (tmp_path / "model" / "config.json").unlink()  # a tokenizer alone
    checked = trainwright("data", "check", *asked, cwd=tmp_path)
    assert checked.returncode == 0 and "3 examples, 84 tokens" in checked.stdout, checked.stderr


def test_show_of_a_recipe_says_what_is_cut_and_left_out_and_how_full_packs_are(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a" * 30}] * 8 + [{"question": "q", "answer": "b" * 200}]
    write(tmp_path / "rows.jsonl", [*rows, {"question": "q", "answer": ""}])
    recipe = {
        "task": "sft",
        "model": {"config": {"model_type": "llama"}, "tokenizer": "bytes"},
        "data": {"train": "rows.jsonl", "validation": None, "max_length": 100, "pack_length": 120},
        "train": {"global_batch_size": 3},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    cache = str(tmp_path / "cache")
    result = trainwright("data", "show", "r.yaml", "-n", "0", cwd=tmp_path, TRAINWRIGHT_CACHE=cache)
    assert result.returncode == 0, result.stderr
    assert "1 of 10 rows cut to data.max_length 100" in result.stdout
    assert "1 row left out: the answer is empty" in result.stdout
    assert "packs of 120 tokens: a batch of 3 examples is" in result.stdout
    small, large = 52, 100  # tokens of the short rows and of the one that is cut
    assert f"{small:>3} - " in result.stdout and f" - {large} " in result.stdout
    # Two short ones share a pack, the long one has its own: nine examples in three batches are 6 packs.
    assert f"{(8 * small + large) / (6 * 120):.1%} full" in result.stdout


def test_check_lists_every_wrong_row_with_its_line(tmp_path: Path) -> None:
    good = {"messages": [USER, ASSISTANT]}
    empty = {"messages": [{**USER, "content": ""}, ASSISTANT]}
    twice = {"messages": [USER, ASSISTANT, {"role": "tool", "content": "t"}, USER]}
    system = {"messages": [USER, ASSISTANT, {"role": "system", "content": "s"}]}
    write(tmp_path / "rows.jsonl", [good, empty, twice, good, system])
    result = trainwright("data", "check", "rows.jsonl", cwd=tmp_path)
    assert result.returncode == 2
    assert "5 rows of messages: 2 examples" in result.stdout
    assert "error: 3 rows are invalid:" in result.stderr
    for line, said in ((2, "is empty"), (3, "roles are out of order"), (5, "roles are out of order")):
        assert any(f"rows.jsonl:{line}: " in one and said in one for one in result.stderr.splitlines())
    assert trainwright("data", "check", write(tmp_path / "good.jsonl", [good]), cwd=tmp_path).returncode == 0


def test_check_names_the_row_that_a_template_rejects(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [SHAPES["messages"], {"messages": [USER, ASSISTANT, {**USER, "content": "no"}]}])
    refusing = (
        "{% for m in messages %}{% if m['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}"
        "{{ m['role'] + m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(refusing)
    result = trainwright(
        *("data", "check", "rows.jsonl", "--model", "bytes", "model.chat_template=template.jinja"), cwd=tmp_path
    )
    assert result.returncode == 2
    assert "rows.jsonl:2: the chat template of" in result.stderr and "not this" in result.stderr
    assert "rows.jsonl:1:" not in result.stderr


def test_prepare_and_style(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text("frage;antwort;topic\nWhy?;So.;a\nWhy?;So.;b\nWho?;Me.;c\n")
    names = ("--map", "frage=question", "--map", "antwort=answer")
    result = trainwright("data", "prepare", "raw.csv", "--out", "out", "--validation", "0", *names, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "raw.csv: 3 rows of question_answer (read frage as question, antwort as answer): 2 kept" in result.stdout
    assert "columns not kept: topic; --keep COLUMN writes one too, --map COLUMN=FIELD uses it" in result.stdout
    assert "1 row repeats an earlier one, left out; a column not kept differs in 1" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["statistics.json", "train.jsonl"]
    (tmp_path / "prompt.txt").write_text("Be brief.\n")
    style = ("data", "style", "out/train.jsonl", "--system", "@prompt.txt", "--out", "styled.jsonl")
    assert trainwright(*style, cwd=tmp_path).returncode == 0
    first = json.loads((tmp_path / "styled.jsonl").read_text().splitlines()[0])
    assert first == {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]}
    again = ("data", "style", "styled.jsonl", "--system", "Be long.", "--out", "again.jsonl")
    assert "2 unchanged" in trainwright(*again, cwd=tmp_path).stdout
    (tmp_path / "again.jsonl").unlink()
    assert "2 replaced" in trainwright(*again, "--replace", cwd=tmp_path).stdout
    assert "Be long." in (tmp_path / "again.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "rows.jsonl"), "pass --model"),
        (("show", "nowhere.jsonl", "--model", "bytes"), "error: no file nowhere.jsonl"),
        (("show", "rows.jsonl", "--model", "nowhere/at/all"), "error: --model: nowhere does not exist"),
        (("check", "wrong.jsonl", "--model", "bytes"), "error: wrong.jsonl: the rows have the fields x"),
        (("prepare", "rows.jsonl", "--out", "out", "--map", "frage"), "--map frage: expected THEIRS=OURS"),
        (("style", "text.jsonl", "--system", "s", "--out", "o.jsonl"), "plain text without turns"),
        (("style", "rows.jsonl", "--system", "@nowhere", "--out", "o.jsonl"), "--system: nowhere: no such file"),
        (("style", "rows.jsonl", "--system", "s", "--out", "rows.jsonl"), "already exists"),
    ],
)
def test_wrong_requests_end_with_2_and_one_message(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write(tmp_path / "rows.jsonl", [SHAPES["messages"]])
    write(tmp_path / "text.jsonl", [SHAPES["text"]])
    write(tmp_path / "wrong.jsonl", [{"x": 1}])
    result = trainwright("data", *arguments, cwd=tmp_path, TRAINWRIGHT_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 2, result.stdout
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()
