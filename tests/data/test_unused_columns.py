"""Columns and fields that no example uses do not matter, whatever their types; images are named as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.check import EncodingCheck, check_rows
from trainwright.data.rows.formats import EXAMPLES
from trainwright.data.rows.pairs import ANY
from trainwright.data.sources.reading import check_source, iterate_source
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection, RowSettings

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(tmp_path: Path, *rows: dict[str, Any]) -> str:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def run(tmp_path: Path, source: str, **data: Any) -> PreparedData:
    section = DataSection(train=source, validation=None, **data)
    return prepare(section, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache")


def with_meta(meta: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0], {**TURNS[1], "meta": meta}]}


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": TURNS, "meta": {"a": 1}}, {"messages": TURNS, "meta": "text"}],
        [{"messages": TURNS, "id": 1}, {"messages": TURNS}, {"messages": TURNS, "id": "two"}],
        [with_meta({"score": 1}), with_meta("checked"), with_meta([1, "two"])],
    ],
    ids=["column", "id", "field of turns"],
)
def test_types_of_what_is_not_used(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    source = write(tmp_path, *rows)
    found = run(tmp_path, source)
    assert found.train.report["examples"] == len(rows)
    name = next(key for key in ("meta", "id") if key in str(rows))
    assert any("not used" in line and name in line for line in found.summary)
    assert not check_rows(
        source, EXAMPLES, RowSettings(), key="data.train", encoding=EncodingCheck(build_bytes_tokenizer())
    ).problems


def test_types_of_what_is_used(tmp_path: Path) -> None:
    source = write(tmp_path, {"question": "a", "answer": "b", "id": 1}, {"question": "a", "answer": 2, "id": "x"})
    with pytest.raises(RequestError, match=r"a.jsonl:2: answer is a number here and text at .*a.jsonl:1"):
        run(tmp_path, source)


def test_columns_of_tables_that_differ_in_type(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, value in enumerate((1, "one")):
        pq.write_table(pa.Table.from_pylist([{"messages": TURNS, "id": value}]), tmp_path / f"{number}.parquet")
    assert run(tmp_path, str(tmp_path)).train.report["examples"] == 2


def test_an_image_is_named(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "oak.png"}, {"type": "text", "text": "What is this?"}]
    text = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, TURNS[1]]}
    source = write(tmp_path, text, {"messages": [{"role": "user", "content": parts}, TURNS[1]]})
    with pytest.raises(
        RequestError, match=r"a.jsonl:2: messages\[\].content has a part of type image, which is not text"
    ):
        run(tmp_path, source)
    (problem,) = check_rows(source, EXAMPLES, RowSettings(), key="data check").problems
    assert "a.jsonl:2: messages[0].content has a part of type image" in problem


def test_rows_with_images_beside_their_text_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, "images": images} for images in (["oak.png"], [], None, ["a.png", "b.png"])]
    source = write(tmp_path, *rows)
    what = "2 rows have images in the column images: only text is trained on"
    assert any(what in line for line in run(tmp_path, source).summary)
    assert any(what in line for line in check_rows(source, EXAMPLES, RowSettings(), key="data check").lines(None))


def test_a_table_with_tools_has_no_unused_fields(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "clock", "description": "Tell the time"}}]
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"messages": TURNS, "tools": tools}]), tmp_path / "a.parquet")
    assert not check_rows(str(tmp_path / "a.parquet"), ANY, RowSettings(), key="data check").remarks


@pytest.mark.parametrize("form", ["a.parquet", "saved"])
def test_columns_of_json_are_read_as_rows(tmp_path: Path, form: str) -> None:
    from datasets import load_dataset

    call = {"function": {"name": "clock", "arguments": {"zone": None}}}
    rows = [
        with_meta({"score": 1}),
        with_meta("checked"),
        {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]},
    ]
    loaded = load_dataset("json", data_files=write(tmp_path, *rows), split="train", cache_dir=str(tmp_path / "hf"))
    assert "Json" in str(loaded.features)
    source = str(tmp_path / form)
    loaded.to_parquet(source) if form == "a.parquet" else loaded.save_to_disk(source)
    (tmp_path / "a.jsonl").unlink()
    read = [row for _, row in iterate_source(source)]
    assert [row["messages"][0]["content"] for row in read] == ["Hi"] * 3
    assert json.loads(read[2]["messages"][1]["tool_calls"]) == [call]
    assert [row["messages"][0]["content"] for row in check_source(source)] == ["Hi"] * 3
    assert not check_rows(source, EXAMPLES, RowSettings(), key="data check").problems
    tokenizer = build_bytes_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = prepare(DataSection(train=source, validation=None), tokenizer, seed=0, cache=tmp_path / "cache")
    assert 'clock{"zone": null}' in tokenizer.decode(found.train.sequence(2)[0])
