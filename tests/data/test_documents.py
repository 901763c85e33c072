from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import environment
from trainwright.data.sources.reading import check_source, iterate_source, list_source_notes, locate_row, read_rows
from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "inner").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.md").write_text("# A\n\ntwo paragraphs\n")
    (root / "inner" / "b.py").write_text("def b():\n\n    return 1\n")
    (root / ".hidden" / "c.md").write_text("no")
    (root / "d.png").write_bytes(b"\x89PNG")
    (root / "empty.py").write_text("")
    return root


def run(tmp_path: Path, **data: Any) -> PreparedData:
    section = DataSection.model_validate({"validation": None, **data})
    return prepare(section, build_bytes_tokenizer(), seed=0, cache=tmp_path / "cache")


def tokens(text: str) -> list[int]:
    return [*text.encode(), build_bytes_tokenizer().eos_token_id]


def test_a_directory_without_rows_is_its_documents_each_whole(tree: Path) -> None:
    expected = [{"text": "# A\n\ntwo paragraphs\n"}, {"text": "def b():\n\n    return 1\n"}]
    assert read_rows(str(tree)).to_list() == check_source(str(tree)) == expected
    assert [row for _, row in iterate_source(str(tree))] == expected
    assert locate_row(str(tree), 1) == f"{tree / 'inner' / 'b.py'}:1"
    assert read_rows(str(tree / "inner" / "b.py")).to_list() == expected[1:]


def test_a_directory_of_texts_is_its_documents_unless_their_names_tell_splits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One\n\nTwo\n")
    (tmp_path / "b.md").write_text("Three\n\nFour\n")
    assert read_rows(str(tmp_path)).to_list() == [{"text": "One\n\nTwo\n"}, {"text": "Three\n\nFour\n"}]
    (tmp_path / "a.txt").rename(tmp_path / "train.txt")
    assert read_rows(str(tmp_path)).to_list() == [{"text": "One"}, {"text": "Two"}]
    assert list_source_notes(str(tmp_path)) == [
        f"{tmp_path}: only the .txt files are read, not b.md; to read another, give its path"
    ]


def test_a_text_is_paragraphs_or_where_that_is_asked_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("One\n\nTwo\n")
    assert len(run(tmp_path, train=str(file)).train) == 2
    found = run(tmp_path, train=str(file), format="documents")
    assert found.train.sequence(0)[0].tolist() == tokens("One\n\nTwo\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    assert len(run(tmp_path, train=str(tmp_path), format="documents").train) == 1


def test_a_long_document_is_split_and_every_token_learnt_once(tmp_path: Path) -> None:
    text = "".join(chr(97 + n % 26) for n in range(333))
    (tmp_path / "a.py").write_text(text)
    found = run(tmp_path, train=str(tmp_path / "a.py"), max_length=50)
    learned: list[int] = []
    for index in range(len(found.train)):
        ids, targets = found.train.sequence(index)
        assert len(ids) <= 50 and targets.all()
        learned += ids[1:].tolist()
    assert learned == tokens(text)[1:]
    assert found.train.report["divided"] == 1 and found.train.report["cut_tokens"] == 0
    assert any("1 of 1 row split at data.max_length 50" in line for line in found.summary)
    cut = run(tmp_path, train=str(tmp_path / "a.py"), max_length=50, long_documents="cut")
    assert (len(cut.train), cut.train.report["cut_tokens"]) == (1, 284)


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [f'{{"question": "q", "answer": "{"a" * length}"}}\n' for length in (10, 100, 11, 90)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    cut = run(tmp_path, train=str(tmp_path / "rows.jsonl"), max_length=60)
    left = run(tmp_path, train=str(tmp_path / "rows.jsonl"), max_length=60, long_documents="drop")
    assert [cut.train.target_count(i) for i in (0, 2)] == [left.train.target_count(i) for i in range(len(left.train))]
    assert len(cut.train) == 4 and left.train.report["cut_tokens"] == left.train.report["truncated"] == 0
    assert any("2 rows left out: it is longer than data.max_length 60" in line for line in left.summary)


@pytest.mark.parametrize("length", [49, 50, 51, 98, 99, 100, 148])
def test_windows_at_their_borders(tmp_path: Path, length: int) -> None:
    (tmp_path / "a.py").write_text("x" * (length - 1))  # and the end of text
    found = run(tmp_path, train=str(tmp_path / "a.py"), max_length=50)
    assert sum(found.train.target_count(i) for i in range(len(found.train))) == length - 1
    assert min(found.train.length(i) for i in range(len(found.train))) >= 2


def test_windows_of_a_document_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for n in range(10):
        (tmp_path / "docs" / f"{n}.py").write_text(f"{n}" * 200)
    found = run(tmp_path, train=str(tmp_path / "docs"), max_length=64, validation=3)
    assert found.validation is not None
    letters = [{chr(d.sequence(i)[0][0]) for i in range(len(d))} for d in (found.train, found.validation)]
    assert [len(side) for side in letters] == [7, 3] and not letters[0] & letters[1]


def test_a_conversation_that_is_split_keeps_windows_with_targets(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "' + "q" * 200 + '", "answer": "' + "a" * 100 + '"}\n')
    found = run(tmp_path, train=str(tmp_path / "a.jsonl"), max_length=64, long_documents="split")
    whole = run(tmp_path, train=str(tmp_path / "a.jsonl"), max_length=1024)
    count = sum(found.train.target_count(i) for i in range(len(found.train)))
    assert count == whole.train.target_count(0) == 101
    assert any("parts of data.max_length tokens without a target" in line for line in found.summary)


def test_a_document_that_is_no_text_is_named(tree: Path) -> None:
    (tree / "z.py").write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(RequestError, match=r"z\.py:2: not UTF-8 text"):
        read_rows(str(tree / "z.py"))
    assert list_source_notes(str(tree)) == [
        f"{tree / 'empty.py'} is empty and is skipped",
        f"{tree / 'z.py'} is not UTF-8 text (line 2) and is skipped",
    ]
    (tree / "nothing").mkdir()
    with pytest.raises(RequestError, match="has no document"):
        read_rows(str(tree / "nothing"), documents=True)


def test_word_files_are_paragraphs_and_tables(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    document = docx.Document()
    document.add_paragraph("Grüße")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
    document.add_paragraph("End")
    document.save(tmp_path / "a.docx")
    assert read_rows(str(tmp_path / "a.docx")).to_list() == [{"text": "Grüße\nleft\tright\nEnd"}]
    (tmp_path / "b.docx").write_text("no zip")
    with pytest.raises(RequestError, match=r"b\.docx: not a Word file"):
        read_rows(str(tmp_path / "b.docx"))


LIMITED = """
import json, sys
from pathlib import Path
from tests.support.memory import limit
from trainwright.data.stream.dataset_cache import prepare
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.data import DataSection
import datasets, pyarrow.parquet, torch

def run(train, cache):
    section = DataSection(train=train, validation=0.1, max_length=512)
    return prepare(section, build_bytes_tokenizer(), seed=0, cache=Path(cache)).train.token_count

run(sys.argv[1], "small")  # everything is imported, and what the libraries keep they have
limit(int(sys.argv[3]))
print(run(sys.argv[2], "large"))
"""


@pytest.mark.slow
def test_a_source_is_prepared_in_a_memory_that_does_not_hold_its_tokens(tmp_path: Path) -> None:
    """64 MB of tokens and 16 of targets, in 40 MiB more than a small source has taken."""
    row = '{"text": "' + "many words of a row " * 40 + '%d"}\n'
    (tmp_path / "small.jsonl").write_text("".join(row % n for n in range(3000)))
    with (tmp_path / "large.jsonl").open("w") as file:
        file.writelines(row % n for n in range(20_000))
    command = [sys.executable, "-c", LIMITED, "small.jsonl", "large.jsonl", "40"]
    variables = environment(TOKENIZERS_PARALLELISM="false")
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 14_000_000
