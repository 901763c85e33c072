from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.sources import reading
from trainwright.data.sources.reading import check_source, iterate_source, locate_row, read_rows
from trainwright.data.stream.dataset_cache import prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection

ROWS = [{"question": f"Q{i}", "answer": f"Grüße {i}"} for i in range(5)]


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2)),
        ("a.json", json.dumps({"version": "1", "data": ROWS, "about": {"n": [1]}}, indent=1)),
        ("a.json", lines(ROWS)),
        ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.jsonl", "\ufeff" + json.dumps(ROWS)),
        ("a.jsonl", json.dumps(ROWS, indent=1)),
        ("a.jsonl", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.json", "\ufeff" + json.dumps(ROWS)),
        ("a.jsonl", lines(ROWS)),
        ("a.jsonl", "\ufeff\n" + lines(ROWS).replace("\n", "\r\n\r\n")),
        ("a.ndjson", lines(ROWS).rstrip()),
        ("a.csv", "question,answer\n" + "".join(f'{r["question"]},"{r["answer"]}"\n' for r in ROWS)),
        ("a.csv", "\n , \n\nquestion,answer\n" + "".join(f"{r['question']},{r['answer']}\n\n" for r in ROWS)),
        ("a.csv", "question;answer\n" + "".join(f"{r['question']};{r['answer']}\n" for r in ROWS)),
        ("a.csv", "question; answer\r\n" + "".join(f"{r['question']};{r['answer']}\r\n" for r in ROWS)),
        ("a.csv", "\ufeffquestion\tanswer\n" + "".join(f"{r['question']}\t{r['answer']}\n" for r in ROWS)),
        ("a.tsv", "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS)),
        ("a.tsv", "question\tanswer\n" + "".join(f"{r['question']}\t{r['answer']}\n" for r in ROWS)),
    ],
)
def test_files(tmp_path: Path, name: str, text: str) -> None:
    source = write(tmp_path / name, text)
    assert read_rows(source).to_list() == ROWS
    assert read_rows(source, limit=2).to_list() == ROWS[:2]
    assert check_source(source) == ROWS


def test_parquet(tmp_path: Path) -> None:
    source = parquet(tmp_path / "a.parquet", ROWS)
    assert read_rows(source).to_list() == ROWS
    assert read_rows(source, limit=3).to_list() == ROWS[:3]
    assert check_source(source) == ROWS


def test_columns_of_tables_that_datasets_has_no_type_for(tmp_path: Path) -> None:
    """Maps, as Spark writes them: columns that are not used, and turns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts, turns = pa.map_(pa.string(), pa.string()), [[("role", "user"), ("content", "Hi")]]
    table = pa.table({"messages": pa.array([turns], pa.list_(texts)), "about": pa.array([[("a", "b")]], texts)})
    pq.write_table(table, tmp_path / "a.parquet")
    expected = [{"messages": [{"role": "user", "content": "Hi"}], "about": {"a": "b"}}]
    assert read_rows(str(tmp_path / "a.parquet")).to_list() == expected
    assert [row for _, row in iterate_source(str(tmp_path / "a.parquet"))] == expected
    for kind, key, read in ((pa.int64(), 7, "7"), (pa.binary(), b"a", "a")):
        table = pa.table({"about": pa.array([[[(key, "b")]]], pa.list_(pa.map_(kind, pa.string())))})
        pq.write_table(table, tmp_path / "a.parquet")
        assert read_rows(str(tmp_path / "a.parquet")).to_list() == [{"about": [{read: "b"}]}]
        assert check_source(str(tmp_path / "a.parquet")) == [{"about": [{read: "b"}]}]
    for kind, keys, message in (
        (pa.binary(), [b"\xff"], "'utf-8' codec can't decode"),
        (pa.string(), ["a", "a"], "a map has a key twice"),
    ):
        table = pa.table({"about": pa.array([[(key, "b") for key in keys]], pa.map_(kind, pa.string()))})
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(RequestError, match=rf"a\.parquet: the column about cannot be read: {message}"):
            read_rows(str(tmp_path / "a.parquet"))
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(RequestError, match=r"b\.parquet: has the column text more than once"):
        read_rows(str(tmp_path / "b.parquet"))


def test_text_is_its_paragraphs(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "\nOne\nline two\n\n\n  \nThree\n")
    assert read_rows(source)["text"][:] == ["One\nline two", "Three"]


def test_a_list_of_texts_is_rows_of_text(tmp_path: Path) -> None:
    source = write(tmp_path / "a.json", '["One",\n"two {x}"]')
    assert read_rows(source).to_list() == [{"text": "One"}, {"text": "two {x}"}]
    assert check_source(source) == [{"text": "One"}, {"text": "two {x}"}]


def test_a_directory_is_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", lines(ROWS[3:]))
    write(tmp_path / "a.jsonl", lines(ROWS[:3]))
    write(tmp_path / "README.md", "About.")
    assert read_rows(str(tmp_path)).to_list() == ROWS
    assert read_rows(str(tmp_path), limit=4).to_list() == ROWS[:4]


def test_values_stay_as_they_are_written(tmp_path: Path) -> None:
    rows = [
        {"text": "2024-01-01", "n": 1, "tags": ["x"]},
        {"text": "2024-01-02T00:00:00", "n": 2.5, "extra": None},
    ]
    (first, second) = read_rows(write(tmp_path / "a.jsonl", lines(rows))).to_list()
    assert (first["text"], second["text"]) == ("2024-01-01", "2024-01-02T00:00:00")
    assert (first["tags"], second["tags"], second["n"]) == (["x"], None, 2.5)


def test_columns_that_come_late_and_messages(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "Hi"}
    rows = [{"messages": [turn]} for _ in range(2500)] + [{"messages": [turn | {"name": "x"}], "id": 3}]
    found = read_rows(write(tmp_path / "a.jsonl", lines(rows)))
    assert found[0]["messages"][0] == turn | {"name": None}
    assert found[2500] == {"messages": [turn | {"name": "x"}], "id": 3}


def test_large_sources_are_mapped_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SPILL_BYTES", 50_000)
    monkeypatch.setattr(reading.tempfile, "tempdir", str(tmp_path))
    rows = [{"text": f"{i} " + "x" * 40} for i in range(9000)]
    found = read_rows(write(tmp_path / "a.jsonl", lines(rows)))
    import pyarrow as pa

    assert pa.total_allocated_bytes() < 300_000 or found.data.nbytes > 300_000
    assert found["text"][:] == [row["text"] for row in rows]
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", lines(ROWS[:2]) + '{"question": "x", \n', r"a\.jsonl:3: not JSON: .*\(column 1\)"),
        ("a.jsonl", lines([ROWS[0], "text"]), r"a\.jsonl:2: a row must be an object .* not text"),
        ("a.jsonl", lines(ROWS[:1]) + "\ufeff{}", r"a\.jsonl:2: not JSON: .* at the invisible character U\+FEFF"),
        ("a.jsonl", lines(ROWS[:1]) + "\u00a0{}", r"a\.jsonl:2: not JSON: .* at the invisible character U\+00A0"),
        ("a.jsonl", '{"a": 1}\r{"a": 2}\r', r"a\.jsonl:1: not JSON: a carriage return .*; save the file"),
        ("a.csv", "question,answer\ra,b\r", r"a\.csv:1: not CSV: a carriage return .*; save the file"),
        (
            "a.jsonl",
            lines(ROWS[:1]) + json.dumps(ROWS[0]) * 2,
            r"a\.jsonl:2: not JSON: extra data .*write one row per line",
        ),
        ("a.jsonl", '{"a": 1}\n{"a": Infinity}\n', r"a\.jsonl:2: not JSON: Infinity is not a JSON value; use null"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', r"a\.jsonl:2: not JSON: the key 'a' occurs twice"),
        ("a.json", '[{"a": 1},\n{"b": [{"c": 1, "c": 1}]}]', r"a\.json:2: not JSON: the key 'c' occurs twice"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "9" * 5000 + "}", r"a\.jsonl:2: not JSON: .*integer string conversion"),
        ("a.jsonl", '{"a": 1}\n{"b": ["x", {"c": "\\ud800"}]}', r"a\.jsonl:2: b\[\]\.c contains an unpaired surrogate"),
        ("a.json", '[{"a": 1},\n{"\\udc00": null}]', r"a\.json:2: the name of a field contains an unpaired surrogate"),
        ("a.json", b"\xff\xfe[\x00", r"a\.json: UTF-16 text; save the file as UTF-8"),
        ("a.txt", "One\n\n\0\x01", r"a\.txt:3: not text: a zero byte"),
        ("a.jsonl.gz", lines(ROWS), r"a\.jsonl\.gz: cannot be read: Not a gzipped file"),
        ("a.parquet.gz", "x", r"a\.parquet\.gz: compressed \.parquet files .*decompress it"),
        ("a.jsonl", b'{"a": "x"}\n{"a": "\xff"}\n', r"a\.jsonl:2: not UTF-8"),
        ("a.json", '[\n{"a": 1},\n{"a": }\n]', r"a\.json:3: not JSON"),
        ("a.json", '[\n{"a": 1},\n\n3]', r"a\.json:4: a row must be an object .* not a number"),
        ("a.json", '["some text",\n{"a": 1},\n3]', r"a\.json:3: a row must be an object .* not a number"),
        ("a.json", '[{"a": 1},\n"some text"]', r"a\.json:2: a row must be an object .* not text"),
        ("a.json", '[\n{"a": 1}\n{"a": 2}]', r"a\.json:3: not JSON rows: ',' or ']' should follow"),
        ("a.json", '[\n{"a": 1},\n{"a": 2}\n', r"a\.json:4: not JSON rows: .*cut off"),
        ("a.json", '[\n{"a": 1}]\n{"a": 2}', r"a\.json:3: not JSON rows: extra data after the list"),
        ("a.jsonl", '["b", "c"]\n{"a": 2}', r"a\.jsonl:2: not JSON rows: extra data after the list"),
        ("a.jsonl", '[{"a": 1}]\n[{"a": 2}]', r"a\.jsonl:2: not JSON rows: extra data after the list"),
        ("a.jsonl", '[]\n{"a": 2}', r"a\.jsonl:2: not JSON rows: extra data after the list"),
        ("a.json", '{"a": [1], "b": [2]}', r"a\.json: expected one list of rows .* 2 lists \(a, b\)"),
        ("a.json", '{"a": "b"}', r"a\.json: expected one list of rows .* none"),
        ("a.json", '\n"text"', r"a\.json:2: not JSON rows"),
        ("a.json", b'[\n{"a": "\xe9"}]', r"a\.json:2: not UTF-8"),
        ("a.csv", 'q,a\n1,2\n"x\ny",3\n1,2,3\n', r"a\.csv:5: 3 fields where the header has 2 \(q, a\)"),
        ("a.csv", 'q,a\n1,"2\n', r"a\.csv:2: not CSV: unexpected end of data"),
        ("a.csv", "q,q\n1,2\n", r"a\.csv:1: the header names 'q' more than once"),
        ("a.csv", b"q,a\n1,\xff\n", r"a\.csv:2: not UTF-8"),
        ("a.csv", "\n\nq,q\n1,2\n", r"a\.csv:3: the header names 'q' more than once"),
        ("a.csv", "\nq,a\n1,2\n1\n", r"a\.csv:4: 1 field where the header has 2"),
        ("a.jsonl", lines(ROWS[:1]) + '{"a": ' + "[" * 50000 + "\n", r"a\.jsonl:2: nested more than 32 deep"),
        ("a.jsonl", lines(ROWS[:1]) + '{"a": ' + "[" * 32 + "]" * 32 + "}\n", r"a\.jsonl:2: nested more than 32 deep"),
        ("a.json", '[\n{"a": 1},\n{"a": ' + "[" * 50000, r"a\.json:3: nested more than 32 deep"),
        ("a.json", '\n{"rows": [{"a": ' + '{"b": ' * 50000, r"a\.json:2: nested more than 32 deep"),
        ("a.parquet", "no", r"a\.parquet: not a Parquet file"),
        ("a.jsonl", "", r"data\.train: .*a\.jsonl is empty"),
        ("a.jsonl", "\n\n", r"a\.jsonl.* no rows"),
        ("a.json", "[]", r"a\.json.* no rows"),
        ("a.csv", "q,a\n", r"a\.csv.* no rows"),
        ("a.xlsx", "x", r"a\.xlsx: unsupported file type; supported are \.json, "),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    source = write(tmp_path / name, text)
    with pytest.raises(RequestError, match=message):
        read_rows(source)
    with pytest.raises(RequestError, match=message):
        check_source(source)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": "x"}, {"a": 1}], r":2: a is a number here and text at .*a\.jsonl:1; use one type"),
        ([{"a": 1}, {"b": 2}, {"a": True}], r":3: a is true or false here and a number at .*:1"),
        ([{"a": ["x"]}, {"a": "x"}], r":2: a is text here and a list at .*:1"),
        (
            [{"m": [{"role": "u", "content": "x"}]}, {"m": [{"role": "u", "content": ["x"]}]}],
            r":2: m\[\]\.content is a list here and text",
        ),
        ([{"a": "x"}] * 3000 + [{"a": 1}], r":3001: a is a number here and text at .*:1"),
        ([{"a": 1}, {"a": 2**70}], r":2: a is a number of more than 64 bits"),
        ([{"a": "\ud800"}], r":1: a contains an unpaired surrogate"),
    ],
)
def test_values_of_different_types(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_rows(write(tmp_path / "a.jsonl", lines(rows)))


def test_content_may_be_text_here_and_a_list_of_parts_there(tmp_path: Path) -> None:
    user, bot = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
    rows = [{"messages": [user, bot]}, {"messages": [user, parts]}, {"messages": [user, bot, user, parts]}]
    source = write(tmp_path / "a.jsonl", lines(rows))
    assert read_rows(source).to_list() == [{"messages": [user, bot] * n} for n in (1, 1, 2)]
    assert check_source(source) == read_rows(source).to_list()


def test_the_place_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    first = write(tmp_path / "rows" / "a.jsonl", "\n" + lines(ROWS[:2]) + "\n" + lines(ROWS[2:3]))
    second = write(tmp_path / "rows" / "b.jsonl", lines(ROWS))
    places = [locate_row(str(tmp_path / "rows"), index) for index in range(5)]
    assert places == [f"{first}:2", f"{first}:3", f"{first}:5", f"{second}:1", f"{second}:2"]
    (tmp_path / "parquet").mkdir()
    files = [parquet(tmp_path / "parquet" / f"{name}.parquet", ROWS[:3]) for name in "ab"]
    assert locate_row(str(tmp_path / "parquet"), 2) == f"{files[0]}: row 3"
    assert locate_row(str(tmp_path / "parquet"), 4) == f"{files[1]}: row 2"
    assert locate_row("some-org/some-data", 4) == "some-org/some-data: row 5"


def test_a_missing_file_and_what_is_near(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(RequestError, match=r"data\.validation: no file .*tran\.jsonl; did you mean train"):
        read_rows(str(tmp_path / "tran.jsonl"), key="data.validation")
    with pytest.raises(RequestError, match="no such directory"):
        check_source(str(tmp_path / "nowhere" / "a.jsonl"))
    with pytest.raises(RequestError, match=r"\*\.jsonl is a pattern, which is not expanded \(1 file\); give their dir"):
        check_source(str(tmp_path / "*.jsonl"))
    write(tmp_path / "a, b.jsonl", "{}")
    both = f'(2 files); give their directory, or a list of them such as \'[{{source: "{tmp_path}/a, b.jsonl[:9]"}}, {{'
    with pytest.raises(RequestError, match=re.escape(both)):
        check_source(f"{tmp_path}/*.jsonl[:9]")
    for url in ("hf://datasets/owner/name/a.jsonl", "https://huggingface.co/datasets/owner/name"):
        with pytest.raises(RequestError, match=f"{url} is a URL; for a dataset of the Hub write owner/name$"):
            check_source(url)
    with pytest.raises(RequestError, match=r"s3://bucket/rows\.jsonl is a URL, and rows are read from files"):
        check_source("s3://bucket/rows.jsonl")


def test_directories_that_are_no_one_data_set(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no \.json"):
        check_source(str(tmp_path))
    write(tmp_path / "train.jsonl", lines(ROWS))
    write(tmp_path / "test.jsonl", lines(ROWS))
    write(tmp_path / "other.json", "[]")
    with pytest.raises(RequestError, match="several types"):
        read_rows(str(tmp_path))


def test_a_hub_dataset_without_the_hub() -> None:
    code = (
        "from trainwright.data.sources.reading import *\n"
        "assert check_source('some-org/some-data') == []\n"
        "try: read_rows('some-org/some-data')\n"
        "except RequestError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path), "HF_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("data.train: some-org/some-data: no such file or directory, and the Hub")
    assert "use a local file instead" in done.stdout


def test_one_file_of_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    calls = []

    def load(*arguments: Any, **options: Any) -> datasets.Dataset:
        calls.append((arguments, options))
        return datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_rows("owner/name:data/rows.jsonl[1:]").to_list() == [{"text": "b"}]
    assert calls == [(("owner/name", None), {"split": "train", "data_files": "data/rows.jsonl", "streaming": False})]
    with pytest.raises(RequestError, match="no such directory"):
        read_rows("owner/name.jsonl")


def test_pydoc_is_a_source() -> None:
    assert read_rows("pydoc", limit=7).column_names == ["question", "answer"]
    assert len(read_rows("pydoc", limit=7)) == 7


def test_checking_imports_nothing_heavy(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", lines(ROWS))
    code = (
        "import sys; from trainwright.data.sources.reading import check_source; check_source(sys.argv[1]);"
        "assert not {'torch', 'datasets', 'transformers', 'pyarrow', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, source], check=True)


@pytest.mark.parametrize(
    ("part", "numbers"),
    [
        ("[:3]", range(3)),
        ("[7:]", range(7, 10)),
        ("[2:5]", range(2, 5)),
        ("[8:20]", range(8, 10)),
        ("[:20%]", range(2)),
        ("[25%:]", range(2, 10)),  # rounded as datasets does
        ("[12.5%:]", range(1, 10)),
        ("[50%:8]", range(5, 8)),
        ("[:]", range(10)),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_source_may_end_with_a_slice(tmp_path: Path, part: str, numbers: range, suffix: str) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"question": f"{n}?", "answer": "yes"} for n in range(10)])
    file = tmp_path / f"a.{suffix}"
    rows.to_parquet(file) if suffix == "parquet" else rows.to_json(file)
    source, expected = f"{file}{part}", [f"{n}?" for n in numbers]
    assert read_rows(source)["question"][:] == expected
    assert [row["question"] for _, row in iterate_source(source)] == expected
    limited = read_rows(source, limit=2)["question"][:]
    assert limited == expected[:2] == [row["question"] for _, row in iterate_source(source, 2)]
    locations = [location for location, _ in iterate_source(source)]
    assert locations == [locate_row(source, index) for index in range(len(expected))]
    assert locations[0] == (f"{file}:{numbers[0] + 1}" if suffix == "jsonl" else f"{file}: row {numbers[0] + 1}")


def test_built_in_sources_have_slices_and_empty_ones_are_refused(tmp_path: Path) -> None:
    assert read_rows("pydoc[5:8]").to_list() == read_rows("pydoc", limit=8).to_list()[5:]
    file = write(tmp_path / "a.jsonl", lines(ROWS))
    for part, said in (("[100:]", "has no rows"), ("[3:1]", "the slice ends before it begins")):
        with pytest.raises(RequestError, match=said):
            read_rows(f"{file}{part}")


def test_slices_of_a_file_are_data_of_their_own(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", lines([{"question": f"{n}?", "answer": "yes"} for n in range(10)]))
    found = []
    for part in ("", "[:4]", "[4:]"):
        data = DataSection.model_validate({"train": f"{file}{part}", "validation": None})
        found.append(prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache").train)
    assert [len(dataset) for dataset in found] == [10, 4, 6]
    assert len({dataset.fingerprint for dataset in found}) == 3
