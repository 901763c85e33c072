"""Directories as people and libraries leave them: what is read of each, what is refused, and what is said of it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from trainwright.data.check import check_data
from trainwright.data.rows.preparing import SplitSettings, prepare_raw
from trainwright.data.rows.texts import iterate_pieces
from trainwright.data.sources import row_files
from trainwright.data.sources.reading import check_source, iterate_source, list_source_notes, locate_row, read_rows
from trainwright.data.stream.dataset_cache import prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.data import DataSection, SourceSection

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def rows(name: str, count: int = 3) -> list[dict[str, Any]]:
    return [{"question": f"{name} {n}?", "answer": f"It is {n}.", "messages": CHAT} for n in range(count)]


def lines(some: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in some)


def write(path: Path, content: str | bytes | list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list) and path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path)
        return path
    content = lines(content) if isinstance(content, list) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def questions(source: object) -> list[str]:
    """As training reads them; the same as a row at a time, and as what looks at the first rows."""
    found = [str(row["question"]) for row in read_rows(str(source))]
    assert [row["question"] for _, row in iterate_source(str(source))] == found
    first = [row["question"] for row in check_source(str(source))]
    assert first and first == found[: len(first)]
    return found


def names(split: str) -> list[str]:
    return [row["question"] for row in rows(split)]


def saved(directory: Path) -> None:
    DatasetDict({name: Dataset.from_list(rows(name)) for name in ("train", "validation", "test")}).save_to_disk(
        directory
    )


def repository(directory: Path) -> None:
    for split in ("test", "train", "validation"):
        write(directory / "data" / f"{split}-00000-of-00001.parquet", rows(split))
    write(directory / "README.md", "# A data set")


def configured(directory: Path) -> None:
    files = [{"split": split, "path": f"parts/{split[:2]}*.parquet"} for split in ("train", "validation", "test")]
    about = {"configs": [{"config_name": "default", "data_files": files}], "license": "mit"}
    write(directory / "README.md", f"---\n{json.dumps(about)}\n---\n# A data set")
    for split in ("train", "validation", "test"):
        write(directory / "parts" / f"{split[:2]}0.parquet", rows(split))


def files(directory: Path) -> None:
    for split, name in (("train", "my_train.jsonl"), ("validation", "my_dev.jsonl"), ("test", "my_test.jsonl")):
        write(directory / name, rows(split))
    write(directory / "statistics.json", "{}")


def folders(directory: Path) -> None:
    for split in ("train", "validation", "test"):
        write(directory / split / "0.jsonl", rows(split))


@pytest.mark.parametrize("make", [saved, repository, configured, files, folders])
def test_splits_are_read_by_their_names_and_the_others_are_told(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "d")
    for split in ("train", "validation", "test"):
        assert questions(f"{tmp_path}/d:{split}") == names(split)
    assert questions(tmp_path / "d") == names("train")
    assert [row["question"] for row in read_rows(f"{tmp_path}/d", key="data.validation")] == names("validation")
    (note,) = list_source_notes(f"{tmp_path}/d")
    assert note.startswith(f"the split train of {tmp_path}/d is read; others are")
    assert f"{tmp_path}/d:test" in note and f"{tmp_path}/d:validation" in note
    with pytest.raises(
        RequestError, match=r"data\.train: .*/d has no split dev2; it has .*train.*; choose one, such as"
    ):
        read_rows(f"{tmp_path}/d:dev2")
    with pytest.raises(RequestError, match=r"--data: .*/d has the splits .*; choose one"):
        read_rows(f"{tmp_path}/d", key="--data")


def test_a_saved_dataset_is_read_trained_on_and_known_by_its_content(tmp_path: Path) -> None:
    def save(name: str) -> None:
        some = [{"question": row["question"], "answer": row["answer"]} for row in rows(name, 40)]
        Dataset.from_list(some).save_to_disk(tmp_path / "d", num_shards=2)

    save("a")
    assert questions(tmp_path / "d") == [row["question"] for row in rows("a", 40)]
    assert locate_row(str(tmp_path / "d"), 21) == f"{tmp_path}/d/data-00001-of-00002.arrow: row 2"
    assert len(read_rows(str(tmp_path / "d"), limit=25)) == 25

    def prepared() -> Any:
        return prepare(
            DataSection(train=str(tmp_path / "d")), build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache"
        )

    first = prepared()
    assert first.train.report["rows"] == 40 and first.train.report["format"] == "question_answer"
    assert prepared().directory == first.directory
    save("b")
    assert prepared().directory != first.directory
    (tmp_path / "d" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(RequestError, match=r"data\.train: .*/d is incomplete; missing: data-00001-of-00002\.arrow"):
        read_rows(str(tmp_path / "d"))


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "a/b.arrow", "", None, 3])
def test_a_saved_dataset_names_no_file_outside_its_directory(tmp_path: Path, name: Any) -> None:
    Dataset.from_list(rows("a")).save_to_disk(tmp_path / "d")
    write(tmp_path / "d" / "state.json", json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(RequestError, match=r"state\.json lists '.*', which is not a file name in this directory"):
        read_rows(str(tmp_path / "d"))
    about = {"configs": [{"data_files": "../d/*.arrow"}]}
    write(tmp_path / "e" / "README.md", f"---\n{json.dumps(about)}\n---\n")
    with pytest.raises(RequestError, match=r"README\.md names files that are not in its directory"):
        read_rows(str(tmp_path / "e"))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("named", ["[{}]", "{{<<: [{}]}}"], ids=["aliases", "merge keys"])
def test_a_header_made_to_exhaust_memory_is_not_followed(tmp_path: Path, named: str) -> None:
    """Each name stands for ten of what the one before it stands for."""
    many = [f"{name}: &{name} {named.format(', '.join([f'*{one}'] * 10))}" for one, name in pairwise("abcdefghij")]
    configs = "configs: [{config_name: *j, data_files: [{split: *j, path: train.jsonl}]}]"
    write(tmp_path / "README.md", "\n".join(["---", "a: &a {x: y}", *many, configs, "---"]))
    write(tmp_path / "train.jsonl", rows("train"))
    assert questions(tmp_path) == names("train")


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    about = {"dataset_info": ["x" * 1000] * 100, "configs": [{"data_files": "parts/*.jsonl"}]}
    write(tmp_path / "README.md", f"---\n{json.dumps(about)}\n---\n")
    write(tmp_path / "parts" / "0.jsonl", rows("train"))
    assert questions(str(tmp_path)) == names("train")


def test_configurations_are_named(tmp_path: Path) -> None:
    about = {"configs": [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("easy", "hard")]}
    write(tmp_path / "README.md", f"---\n{json.dumps(about)}\n---\n")
    for name in ("easy", "hard"):
        write(tmp_path / name / "0.jsonl", rows(name))
    assert questions(f"{tmp_path}:hard:train") == names("hard")
    with pytest.raises(
        RequestError, match=r"has the configurations easy, hard; choose one with a split, such as .*:easy:train"
    ):
        read_rows(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    repository(tmp_path)
    (tmp_path / "data" / "train-00000-of-00001.parquet").rename(tmp_path / "data" / "train-00001-of-00003.parquet")
    with pytest.raises(RequestError, match=r"2 of 3 files .*/data/train-…-of-00003 are missing, the first .* 00000"):
        read_rows(str(tmp_path))


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"config.json": "{}", "model.safetensors": b"\0"}, "is a model's or a tokenizer's directory .* in model.name"),
        ({"tokenizer.json": "{}", "vocab.txt": "a"}, "is a model's or a tokenizer's directory"),
        ({"pytorch_model.bin": b"\x80\x04"}, "contains model weights .*, not rows"),
        (
            {"a.png": b"\x89PNG", "b.pdf": b"%PDF"},
            r"has no \.json.*; it has \.pdf, \.png files, which are not supported",
        ),
        (
            {"train.jsonl": lines(rows("a")), "other.jsonl": lines(rows("b")), "test.jsonl": "{}"},
            "has splits and other files",
        ),
    ],
)
def test_what_holds_no_rows_is_said_to_be_what_it_is(
    tmp_path: Path, there: dict[str, str | bytes], message: str
) -> None:
    for name, content in there.items():
        write(tmp_path / "d" / name, content)
    with pytest.raises(RequestError, match=rf"^data\.train: .*/d {message}"):
        read_rows(str(tmp_path / "d"))
    recipe = {"task": "sft", "model": {"name": "some/model"}, "data": {"train": str(tmp_path / "d")}}
    with pytest.raises(RequestError, match=message):
        check_data(RecipeSchema.model_validate(recipe))


BAD = {
    "b.jsonl": ("", "is empty"),
    "c.jsonl": ("\n\n", "is empty"),
    "d.jsonl": (b'{"question": "\xff"}', "is not UTF-8 text (line 1)"),
    "e.jsonl.gz": (gzip.compress(lines(rows("x")).encode())[:-20], "cannot be read: "),
}


def test_a_file_of_several_that_cannot_be_read_is_left_out_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows("a"))
    write(tmp_path / "f.jsonl", rows("f"))
    for name, (content, _) in BAD.items():
        write(tmp_path / name, content)
    assert questions(tmp_path) == names("a") + names("f")
    assert locate_row(str(tmp_path), 4) == f"{tmp_path}/f.jsonl:2"
    notes = list_source_notes(str(tmp_path))
    assert len(notes) == len(BAD)
    for note, (name, (_, why)) in zip(notes, BAD.items(), strict=True):
        assert note.startswith(f"{tmp_path}/{name} {why}") and note.endswith(" and is skipped")
    data = DataSection(train=str(tmp_path), validation=None)
    prepared = prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache")
    assert set(notes) <= {line.partition(": ")[2] for line in prepared.summary}
    for name in ("a.jsonl", "f.jsonl"):
        (tmp_path / name).unlink()
    for read in (read_rows, check_source):
        with pytest.raises(RequestError, match=r"^data\.train: no readable files: .*b\.jsonl is empty and is skipped"):
            read(str(tmp_path))


def test_a_damaged_file_of_a_corpus_is_left_out_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "one")
    write(tmp_path / "b.py", b"two \xff")
    write(tmp_path / "c.py", b"\x7fELF\0\0")
    write(tmp_path / "d.py", "three")
    notes: list[str] = []
    found = [piece.text for piece in iterate_pieces(SourceSection(source=str(tmp_path)), "data.train", notes)]
    assert found == ["one", "three"]
    assert notes == [
        f"{tmp_path}/b.py is not UTF-8 text (line 1) and is skipped",
        f"{tmp_path}/c.py is not text: it has a zero byte (line 1) and is skipped",
    ]
    assert [row["text"] for row in read_rows(str(tmp_path))] == ["one", "three"]


def test_many_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    for number in range(9):
        write(tmp_path / f"{number}.py", "" if number else "one")
    assert list_source_notes(str(tmp_path))[-2:] == [
        f"{tmp_path}/4.py is empty and is skipped",
        f"{tmp_path}/5.py is empty and is skipped, and so are 3 more",
    ]
    assert [row["text"] for row in read_rows(str(tmp_path))] == ["one"]


def test_damaged_parquet_among_others_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows("a"))
    whole = write(tmp_path / "b.parquet", rows("b")).read_bytes()
    write(tmp_path / "b.parquet", whole[: len(whole) // 2])
    assert questions(tmp_path) == names("a")
    assert list_source_notes(str(tmp_path)) == [f"{tmp_path}/b.parquet is not a complete Parquet file and is skipped"]


def zstd(data: bytes) -> bytes:
    found: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return found


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd)]
)
def test_compressed_files_are_read(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    file = write(tmp_path / f"a.jsonl{suffix}", compress(lines(rows("a")).encode()))
    assert questions(file) == names("a")
    assert locate_row(str(file), 1) == f"{file}:2"
    assert questions(write(tmp_path / f"a.json{suffix}", compress(json.dumps(rows("a")).encode()))) == names("a")
    text = write(tmp_path / f"a.txt{suffix}", compress(b"One\n\nTwo\n"))
    assert [piece.text for piece in iterate_pieces(SourceSection(source=str(text)), "data.train")] == ["One\n\nTwo\n"]
    assert read_rows(str(text))["text"][:] == ["One", "Two"]


def test_a_line_that_is_no_row_of_any_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "LONGEST_LINE", 2**20)
    bomb = write(tmp_path / "a.jsonl.gz", gzip.compress(lines(rows("a")).encode() + b'{"question": "' + b"x" * 2**24))
    with pytest.raises(RequestError, match=r"a\.jsonl\.gz:4: a line of more than 1 MiB"):
        read_rows(str(bomb))


def test_names_that_are_no_utf8_are_read_and_printed(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    write(Path(name), rows("a"))
    assert questions(name) == names("a")
    prepare_raw([name], tmp_path / "out", SplitSettings(0, 0, 0, "none"), renamed={})
    assert json.loads((tmp_path / "out" / "statistics.json").read_text())["sources"][0]["source"] == name
