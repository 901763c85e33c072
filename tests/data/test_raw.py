from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainwright.data.rows.preparing import SplitSettings, Statistics, prepare_raw
from trainwright.data.sources.reading import read_rows
from trainwright.errors import RequestError


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path: Path, *sources: str, out: str = "out", **options: Any) -> Statistics:
    values = {"validation": 0.0, "test": 0.0, "seed": 0, "deduplicate": "exact", **options}
    split = SplitSettings(**{name: values.pop(name) for name in ("validation", "test", "seed", "deduplicate")})
    return prepare_raw(list(sources), tmp_path / out, split, **{"renamed": {}, **values})


def rows_of(tmp_path: Path, name: str = "train", out: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / out / f"{name}.jsonl").read_text().splitlines()]


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


MANY = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(200)]


def test_files_with_fields_of_any_name_become_messages(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Query,Response,id\nWhat?,This.,1\n")
    usual = write(tmp_path / "b.jsonl", [{"instruction": "Add", "input": "1 and 2", "output": "3"}])
    (tmp_path / "c.json").write_text(json.dumps([{"frage": {"text": "Was?"}, "antwort": "Das."}]))
    sources = (str(tmp_path / "a.csv"), usual, str(tmp_path / "c.json"))
    found = run(tmp_path, *sources, renamed={"frage.text": "question", "antwort": "answer"})
    assert rows_of(tmp_path) == [
        conversation("What?", "This."),
        conversation("Add\n\n1 and 2", "3"),
        conversation("Was?", "Das."),
    ]
    assert found.sources[0].renamed["Query"] == "question"
    assert [source.layout for source in found.sources] == ["question_answer", "instruction", "question_answer"]


def test_a_column_that_is_not_kept_is_named_and_rows_that_differ_in_it_are_counted(tmp_path: Path) -> None:
    rows = [{**MANY[0], "topic": topic} for topic in ("a", "b", "a", None)]
    source = write(tmp_path / "a.jsonl", [*rows, {**MANY[1], "late": 1}])
    [counts] = run(tmp_path, source).sources
    assert rows_of(tmp_path) == [conversation("What is 0?", "It is 0."), conversation("What is 1?", "It is 1.")]
    assert (counts.not_kept, counts.duplicates, counts.differing) == ({"topic": 3, "late": 1}, 3, 2)
    [counts] = run(tmp_path, source, out="kept", keep=["topic"]).sources
    assert [row.get("topic") for row in rows_of(tmp_path, out="kept")] == ["a", "b", None, None]
    assert (counts.kept, counts.not_kept, counts.duplicates) == (["topic"], {"late": 1}, 1)
    run(tmp_path, source, out="all", keep=["all"])
    assert rows_of(tmp_path, out="all")[-1] == {**conversation("What is 1?", "It is 1."), "late": 1}
    assert len(read_rows(str(tmp_path / "all" / "train.jsonl"))) == 4
    with pytest.raises(RequestError, match=r"--keep: no row has a column color .* other columns: late, topic"):
        run(tmp_path, source, out="other", keep=["color"])


def test_values_of_tables_are_kept_as_json_has_them(tmp_path: Path) -> None:
    row = {**MANY[0], "day": date(2024, 1, 2), "score": float("nan"), "tags": ["a"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    run(tmp_path, str(tmp_path / "a.parquet"), keep=["all"])
    [kept] = rows_of(tmp_path)
    assert {name: kept[name] for name in ("day", "score", "tags")} == {
        "day": "2024-01-02",
        "score": None,
        "tags": ["a"],
    }
    pq.write_table(pa.Table.from_pylist([{**MANY[0], "image": b"x"}]), tmp_path / "b.parquet")
    with pytest.raises(RequestError, match="a column of bytes cannot be written as JSON"):
        run(tmp_path, str(tmp_path / "b.parquet"), out="b", keep=["image"])


def test_contexts_are_read_and_rows_that_differ_in_them_are_kept(tmp_path: Path) -> None:
    rows = [{"instruction": "Sum up.", "context": f"Text {n}.", "response": "It is a text."} for n in range(3)]
    [counts] = run(tmp_path, write(tmp_path / "a.jsonl", rows)).sources
    assert counts.duplicates == 0 and counts.renamed == {"response": "output", "context": "input"}
    assert [row["messages"][0]["content"] for row in rows_of(tmp_path)] == [f"Sum up.\n\nText {n}." for n in range(3)]


def test_wrong_rows_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [MANY[0], {"question": "Q", "answer": None}, {"question": "Q", "answer": 3}, MANY[1]]
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        RequestError, match=r"a\.jsonl:2: the field answer is missing.*pass --skip-wrong to skip such rows"
    ):
        run(tmp_path, source)
    [counts] = run(tmp_path, source, skip_wrong=True).sources
    assert (counts.rows, counts.wrong, len(rows_of(tmp_path))) == (4, 2, 2)
    assert [problem.split(": ")[0].rpartition("/")[2] for problem in counts.first_wrong] == ["a.jsonl:2", "a.jsonl:3"]


def test_what_is_written_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Turns that are not trained on stay such; preferences and labels keep their sides."""
    prompt = [*conversation("a", "b")["messages"], {"role": "user", "content": "c"}]
    kinds: dict[str, list[dict[str, Any]]] = {
        "turns": [{"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}],
        "pairs": [{"prompt": "p", "chosen": "good", "rejected": "bad"}],
        "labels": [{"prompt": "p", "completion": "bad", "label": False}],
        "texts": [{"text": "plain"}],
    }
    for name, rows in kinds.items():
        run(tmp_path, write(tmp_path / f"{name}.jsonl", rows), out=name)
        again = run(tmp_path, str(tmp_path / name / "train.jsonl"), out=f"{name}-again")
        assert again.sources[0].rows == 1
        assert rows_of(tmp_path, out=name) == rows_of(tmp_path, out=f"{name}-again")
    [turns] = rows_of(tmp_path, out="turns")
    assert [m.get("target", True) for m in turns["messages"]] == [True, False, True, True]
    [pair] = rows_of(tmp_path, out="pairs")
    assert [pair[side][-1]["content"] for side in ("chosen", "rejected")] == ["good", "bad"]
    assert rows_of(tmp_path, out="labels")[0]["label"] is False


def test_the_split_is_of_the_asked_size_by_seed_and_content_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", MANY)
    found = run(tmp_path, source, validation=0.1, test=0.05)
    assert {name: side.rows for name, side in found.sides.items()} == {"train": 170, "validation": 20, "test": 10}
    sides = {name: rows_of(tmp_path, name) for name in found.sides}
    everything = [json.dumps(row) for rows in sides.values() for row in rows]
    assert len(set(everything)) == 200
    run(tmp_path, write(tmp_path / "b.jsonl", MANY[::-1]), out="reversed", validation=0.1, test=0.05)
    assert rows_of(tmp_path, "test", "reversed") == sides["test"][::-1]
    run(tmp_path, source, out="other", validation=0.1, test=0.05, seed=1)
    assert rows_of(tmp_path, "test", "other") != sides["test"]


def test_equal_rows_that_are_kept_are_on_one_side(tmp_path: Path) -> None:
    found = run(tmp_path, write(tmp_path / "a.jsonl", MANY * 3), validation=0.3, deduplicate="none")
    held = {json.dumps(row) for row in rows_of(tmp_path, "validation")}
    assert held and not held & {json.dumps(row) for row in rows_of(tmp_path)}
    assert sum(side.rows for side in found.sides.values()) == 600 and found.sides["validation"].rows <= 180


def test_duplicates_exact_and_near(tmp_path: Path) -> None:
    text = " ".join(f"word{n}" for n in range(120))
    near = [{"text": text}, {"text": text + " and more"}, {"text": text.upper()}, {"text": text[::-1]}, {"text": text}]
    source = write(tmp_path / "a.jsonl", near)
    assert run(tmp_path, source, out="none", deduplicate="none").sides["train"].rows == 5
    exact = run(tmp_path, source, out="exact")
    assert (exact.sides["train"].rows, exact.sources[0].duplicates) == (4, 1)
    run(tmp_path, source, out="near", deduplicate="near")
    assert rows_of(tmp_path, out="near") == [near[0], near[3]]


def test_rows_that_differ_by_a_word_in_many_are_not_near_unless_most_is_common(tmp_path: Path) -> None:
    texts = [{"text": " ".join(f"w{(n * 7 + k) % 1000}" for n in range(60))} for k in range(0, 500, 50)]
    found = run(tmp_path, write(tmp_path / "a.jsonl", texts), deduplicate="near")
    assert found.sides["train"].rows == len(texts)


def test_statistics_count_every_row_once(tmp_path: Path) -> None:
    rows = [*MANY[:10], MANY[0], {"question": "q", "answer": ""}]
    run(tmp_path, write(tmp_path / "a.jsonl", rows), validation=0.2)
    kept = json.loads((tmp_path / "out" / "statistics.json").read_text())
    [source] = kept["sources"]
    assert (source["rows"], source["duplicates"], source["left_out"]) == (12, 1, {"the answer is empty": 1})
    assert sum(side["rows"] for side in kept["sides"].values()) == 10
    assert kept["sides"]["validation"]["roles"] == {"user": 2, "assistant": 2}
    side = kept["sides"]["train"]
    assert side["characters"] == sum(len(m["content"]) for r in rows_of(tmp_path) for m in r["messages"])
    assert sum(side["lengths"].values()) == side["rows"] == 8


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([MANY[0], {"question": "", "answer": "a"}], {}, r"a\.jsonl:2: the field question is empty"),
        ([{"color": "red", "size": "3"}], {}, r"a\.jsonl: the rows have the fields color, size.*--map"),
        ([MANY[0]], {"renamed": {"frage": "question"}}, "--map: no row has a field frage"),
        ([MANY[0]], {"validation": 0.6, "test": 0.4}, "leave nothing to train on"),
        ([MANY[0]], {"deduplicate": "some"}, "--deduplicate: unknown value 'some'; choose from exact, near, none"),
        ([{"question": "q", "answer": ""}], {}, "a token to train on"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_left(
    tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(RequestError, match=message):
        run(tmp_path, source, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_directory_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", MANY[:3])
    run(tmp_path, source)
    with pytest.raises(RequestError, match="already exists"):
        run(tmp_path, source)


def test_sources_of_several_kinds_are_refused(tmp_path: Path) -> None:
    chat, text = write(tmp_path / "a.jsonl", MANY[:3]), write(tmp_path / "b.jsonl", [{"text": "t"}])
    with pytest.raises(RequestError, match=r"messages \(.*a\.jsonl\) and text \(.*b\.jsonl\)"):
        run(tmp_path, chat, text)


def test_prepared_rows_are_rows_of_a_recipe(tmp_path: Path) -> None:
    run(tmp_path, write(tmp_path / "a.jsonl", MANY[:3]))
    assert len(read_rows(str(tmp_path / "out" / "train.jsonl"))) == 3
