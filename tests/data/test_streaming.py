"""Sources that are tokenized while training: the same tokens as if they were tokenized whole."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.training import ALONE
from trainwright.data.check import check_sources
from trainwright.data.rows.formats import look_up_reader
from trainwright.data.stream.streamed import Begin, SourceReader, StreamedDataset
from trainwright.errors import MachineError, RequestError
from trainwright.machine.detect import detect
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.planning.facts import build_facts
from trainwright.recipe.loading import build_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.resolve import resolve
from trainwright.tasks.language_model import prepare_data, prepare_once, stream_of
from trainwright.tasks.pretrain.task import _prepare_data as prepare_corpus

SIZES = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256}
TINY = {"config": {"model_type": "gpt2", **SIZES}, "tokenizer": "bytes"}
TOKENIZER = build_bytes_tokenizer()
Example = tuple[list[int], list[bool]]
START = Begin()


def rows(directory: Path, count: int, name: str = "rows.jsonl") -> Path:
    """Conversations of different lengths, some without an answer, and long ones."""
    file = directory / name
    made = [
        {
            "question": f"{name} {n}?",
            "answer": "x" * (1 + 37 * n % 90),
            **({"system": "Be brief."} if n % 7 == 3 else {}),
        }
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def recipe(source: Any, task: str = "sft", **sections: Any) -> RecipeSchema:
    streaming = {"buffer_size": 8, "disk_gb": 0.01}
    data = {"train": source, "validation": None, "max_length": 64, "streaming": streaming, **sections.pop("data", {})}
    length = {"max_steps": 40, "global_batch_size": 6, **sections.pop("train", {})}
    tree = {"task": task, "model": TINY, "data": data, "train": length, **sections}
    return build_recipe([f"{key}={json.dumps(value)}" for key, value in tree.items()], "the test")


def whole(asked: RecipeSchema, cache: Path) -> list[Example]:
    """The examples of a recipe whose rows are tokenized before training."""
    data = asked.data.model_copy(update={"streaming": None})
    asked = asked.model_copy(update={"data": data})
    prepared = prepare_corpus if asked.spec.corpus else prepare_data
    train = prepared(asked, TOKENIZER, cache).train
    return [tuple(part.tolist() for part in train.sequence(index)) for index in range(len(train))]  # type: ignore[misc]


def streamed(asked: RecipeSchema, begin: Begin = START, processes: int = 1) -> Iterator[tuple[Begin, Example]]:
    for place, tokens, targets in SourceReader(asked, TOKENIZER, 384).examples(begin, processes):
        yield place, (tokens.tolist(), targets.tolist())


def documents(directory: Path) -> Path:
    folder = directory / "texts"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"Text {number}. " + "abc def\n" * (number * 7 % 40))
    return folder


CORPUS = [("documents", 1), ("contiguous", 1), ("documents", 2)]


@pytest.mark.parametrize("long", ["auto", "drop", "split"])
def test_the_examples_are_those_of_the_table_that_is_tokenized_whole(tmp_path: Path, long: str) -> None:
    second = tmp_path / "more.jsonl.gz"
    second.write_bytes(gzip.compress(rows(tmp_path, 25, "more.jsonl").read_bytes()))
    both = [{"source": f"{rows(tmp_path, 120)}[3:]"}, {"source": str(second), "limit": 21}]
    asked = recipe(both, data={"mixing": "concatenate", "long_documents": long})
    expected = whole(asked, tmp_path / "cache")
    found = list(islice(streamed(asked), 2 * len(expected)))
    assert [example for _, example in found] == [*expected, *expected]  # of two epochs
    assert found[len(expected)][0] == found[0][0]._replace(epoch=1)
    assert {place.source for place, _ in found} == {0, 1}
    for at in range(0, len(found), 29):  # from any place
        assert (
            list(islice(streamed(asked, found[at][0]), 20)) == [*found, *streamed_again(found, expected)][at : at + 20]
        )


def streamed_again(found: list[tuple[Begin, Example]], expected: list[Example]) -> list[tuple[Begin, Example]]:
    return [(place._replace(epoch=place.epoch + 2), example) for place, example in found[: len(expected)]]


@pytest.mark.parametrize(("windows", "processes"), CORPUS)
def test_the_windows_are_those_of_the_corpus_that_is_tokenized_whole(
    tmp_path: Path, windows: str, processes: int
) -> None:
    asked = recipe(str(documents(tmp_path)), "pretrain", pretrain={"windows": windows}, data={"format": "documents"})
    expected = whole(asked, tmp_path / "cache")
    found = list(islice(streamed(asked, processes=processes), 2 * len(expected)))
    assert [example for _, example in found] == [*expected, *expected]
    for at in range(0, len(expected), 5):
        assert list(islice(streamed(asked, found[at][0]), 12)) == found[at : at + 12]


@pytest.mark.parametrize("kind", ["parquet", "json", "registered", "text"])
def test_every_kind_of_source_is_read(tmp_path: Path, kind: str) -> None:
    import pyarrow.json
    import pyarrow.parquet

    table = pyarrow.json.read_json(rows(tmp_path, 40))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(table.to_pylist()))
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {n}. " * n for n in range(1, 30)))
    names = {"registered": "pydoc[:30]", "text": tmp_path / "text.txt"}
    asked = recipe(str(names.get(kind, tmp_path / f"rows.{kind}")))
    expected = whole(asked, tmp_path / "cache")
    assert [example for _, example in islice(streamed(asked), len(expected))] == expected


def test_rows_of_the_hub_are_downloaded_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset, IterableDataset

    local = rows(tmp_path, 40)
    made = [{"system": None, **json.loads(line)} for line in local.read_text().splitlines()]

    def load(name: str, config: str | None, *, split: str, streaming: bool, **_: Any) -> IterableDataset:
        assert (name, config, split, streaming) == ("owner/rows", None, "train", True)
        return Dataset.from_list(made).to_iterable_dataset()

    expected = whole(recipe(f"{local}[2:]"), tmp_path / "cache")
    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("trainwright.data.sources.hub._is_hub_reachable", lambda endpoint: True)
    assert [example for _, example in islice(streamed(recipe("owner/rows[2:]")), len(expected))] == expected


def opened(asked: RecipeSchema, cache: Path) -> StreamedDataset:
    prepared = prepare_corpus if asked.spec.corpus else prepare_data
    train = prepared(asked, TOKENIZER, cache).train
    assert isinstance(train, StreamedDataset)
    return train


def batches(asked: RecipeSchema, cache: Path, steps: range, state: dict[str, int] | None = None) -> list[Any]:
    """The tokens of the examples of steps."""
    return [batch for batch, _ in batches_and_states(asked, cache, steps, state)]


def batches_and_states(
    asked: RecipeSchema, cache: Path, steps: range, state: dict[str, int] | None = None
) -> list[tuple[Any, dict[str, int]]]:
    """The tokens of the examples of steps, each with the state behind it."""
    stream = stream_of(asked, opened(asked, cache), 10**6, training=True, shuffle=True)
    stream.resume(state or {})
    found = []
    with stream.open_reading(ALONE):
        for step in steps:
            batch, examples = stream.global_batch(step), stream.examples(step)
            assert sorted(example for micro in batch.micro_batches for example in micro.examples) == sorted(examples)
            tokens = [stream.dataset.sequence(example)[0].tolist() for example in examples]
            found.append((tokens, stream.state(step + 1)))
    return found


def test_steps_follow_from_the_seed_and_the_rows(tmp_path: Path) -> None:
    asked = recipe(str(rows(tmp_path, 60)))
    first = batches(asked, tmp_path / "cache", range(20))
    shard = [tokens for _, (tokens, _) in islice(streamed(asked), 8)]
    seen = [tokens for batch in first for tokens in batch]
    assert sorted(seen[:8]) == sorted(shard) and seen[:8] != shard  # shuffled within the shard
    assert sorted(seen[8:16]) == sorted(tokens for _, (tokens, _) in islice(streamed(asked), 8, 16))
    epoch = sorted(tokens for _, (tokens, _) in islice(streamed(asked), 120))
    assert sorted(seen) == epoch  # every row twice, behind the last row again from the first
    seeded = recipe(str(tmp_path / "rows.jsonl"), train={"seed": 1})
    assert batches(seeded, tmp_path / "cache", range(2)) != first[:2]


@pytest.mark.parametrize(("task", "step"), [("sft", 7), ("pretrain", 16)])
def test_a_resumed_run_begins_at_the_row_of_its_checkpoint(tmp_path: Path, task: str, step: int) -> None:
    source = rows(tmp_path, 50) if task == "sft" else documents(tmp_path)
    asked = recipe(str(source), task, **({} if task == "sft" else {"data": {"format": "documents"}}))
    every = batches_and_states(asked, tmp_path / "cache", range(24))
    state = every[step - 1][1]
    assert state["shard"] in {(step * 6 - 1) // 8, step * 6 // 8}  # that of the next step is known once it is made
    rest = batches(asked, tmp_path / "another", range(step, 24), state)
    assert rest == [batch for batch, _ in every[step:]]


def test_going_back_reads_again(tmp_path: Path) -> None:
    """As after a fault, when a run goes on from its newest checkpoint."""
    asked = recipe(str(rows(tmp_path, 60)))
    every = batches(asked, tmp_path / "cache", range(12))
    stream = stream_of(asked, opened(asked, tmp_path / "cache"), 10**6, training=True, shuffle=True)
    with stream.open_reading(ALONE):
        assert stream.dataset.shards.directory is not None
        (stream.dataset.shards.directory / ".0000000001").mkdir()  # a producer was stopped while it wrote
        for step in (*range(9), *range(2, 12)):
            stream.global_batch(step)
            found = [stream.dataset.sequence(example)[0].tolist() for example in stream.examples(step)]
            assert found == every[step]
            if step == 8:  # another process may be some steps behind
                there = {int(shard.name) for shard in stream.dataset.shards.directory.glob("[0-9]*")}
                assert {example // 8 for example in stream.examples(step - 3)} <= there
                assert min(there) > 0


def size(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def test_no_more_than_the_disk_that_is_allowed(tmp_path: Path) -> None:
    source, allowed = rows(tmp_path, 4000), 1_200_000
    asked = recipe(str(source), data={"streaming": {"buffer_size": 64, "disk_gb": allowed / 1e9}, "max_length": 96})
    stream = stream_of(asked, opened(asked, tmp_path / "cache"), 10**6, training=True, shuffle=True)
    most, shards = 0, set[str]()
    with stream.open_reading(ALONE):
        directory = stream.dataset.shards.directory
        assert directory is not None
        for step in range(400):
            stream.global_batch(step)
            while step % 100 == 0 and size(directory) < 0.7 * allowed:
                time.sleep(0.05)  # the producer fills what it may
            most = max(most, size(directory))
            shards |= {path.name for path in directory.glob("0*")}
    assert 0.5 * allowed < most <= allowed
    assert len(shards) > 30  # which together are much larger
    assert not directory.exists()


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    asked = recipe(str(rows(tmp_path, 60)))
    stream = stream_of(asked, opened(asked, tmp_path / "cache"), 10**6, training=True, shuffle=True)
    with stream.open_reading(ALONE):
        mine = stream.dataset.shards.directory
        assert mine is not None
        left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"))
        (left / "0000000000").mkdir(parents=True)
        batches(asked, tmp_path / "cache", range(1))
        assert mine.is_dir() and not left.exists()
    assert list((tmp_path / "cache" / "streams").iterdir()) == []


def test_a_wrong_row_in_the_middle_ends_with_its_place(tmp_path: Path) -> None:
    source = rows(tmp_path, 1500)
    lines = source.read_text().splitlines()
    lines[1201] = '{"question": "?"'
    source.write_text("\n".join(lines))
    asked = recipe(str(source), data={"streaming": {"buffer_size": 50}})
    with pytest.raises(RequestError, match=r"rows\.jsonl:1202: "):
        batches(asked, tmp_path / "cache", range(300))
    lines = [json.dumps({"question": f"{n}?", "answer": "x"}) for n in range(1500)]
    lines[1201] = json.dumps({"question": "?", "answer": "x", "system": "Be brief."})
    source.write_text("\n".join(lines))
    with pytest.raises(RequestError, match=r"rows\.jsonl:1202: has columns that would be used"):
        batches(asked, tmp_path / "cache", range(300))


def test_what_needs_all_rows_before_they_are_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    source = rows(tmp_path / "rows", 600)
    with pytest.raises(RequestError, match="slice it by row numbers"):
        opened(recipe(f"{source}[:10%]"), tmp_path / "cache")
    (tmp_path / "rows" / "second.jsonl").write_bytes(b'{"question": "\xff"}')
    asked = recipe(str(tmp_path / "rows"))  # files that cannot be read are only left out if all are looked at first
    with pytest.raises(RequestError, match=r"second\.jsonl"):
        batches(asked, tmp_path / "cache", range(110))


def test_a_full_disk_ends_in_words(tmp_path: Path) -> None:
    asked = recipe(str(rows(tmp_path, 60)))
    train = opened(asked, tmp_path / "cache")
    with train.shards.open_reading(ALONE), pytest.raises(MachineError, match="the tokens cannot be stored in"):
        assert train.shards.directory is not None
        (train.shards.directory / ".0000000000").write_text("in the way")
        train.sequence(0)


def test_a_source_that_has_changed_is_another_one(tmp_path: Path) -> None:
    source = rows(tmp_path, 3000)
    asked = recipe(str(source))
    before = opened(asked, tmp_path / "cache").fingerprint
    moved = source.rename(tmp_path / "moved.jsonl")
    assert opened(recipe(str(moved)), tmp_path / "other").fingerprint == before
    text = moved.read_text()
    moved.write_text(text[: len(text) // 2] + text[len(text) // 2 :].replace("x", "y", 1))
    assert opened(recipe(str(moved)), tmp_path / "cache").fingerprint != before
    moved.write_text(text)
    longer = recipe(str(moved), data={"streaming": {"buffer_size": 9}})
    assert opened(longer, tmp_path / "cache").fingerprint != before


def test_validation_sets_are_sources_of_their_own(tmp_path: Path) -> None:
    sets = {"own": {"source": str(rows(tmp_path, 9, "own.jsonl"))}, "other": str(rows(tmp_path, 5, "other.jsonl"))}
    asked = recipe(str(rows(tmp_path, 60)), data={"validation": sets})
    prepared = prepare_data(asked, TOKENIZER, tmp_path / "cache")
    assert prepared.validation is not None and prepared.validation.mixture is None
    assert dict(prepared.sets) == {"own": 9, "other": 5} and len(prepared.validation) == 14
    assert any("tokenized while training, in shards of 8 examples" in line for line in prepared.summary)
    (tmp_path / "own.jsonl").unlink()
    with pytest.raises(RequestError, match=r"data\.validation\.own: no file"):
        prepare_data(asked, TOKENIZER, tmp_path / "cache")


def test_a_plan_has_the_lengths_of_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    asked = recipe(str(rows(tmp_path, 3000)), train={"micro_batch_size": 2}, parallel={"strategy": "single"})
    prepare_once(asked, tmp_path / "cache")
    facts = build_facts(resolve(asked, detect()).recipe)
    assert any("examples as long as the first 512" in line for line in facts.assumptions)
    mean = np.mean([len(tokens) for _, (tokens, _) in islice(streamed(asked), 512)])
    assert facts.workload.batch_tokens == pytest.approx(6 * mean, rel=0.05)
    assert [checked.wrong for checked in check_sources(asked, look_up_reader(asked), TOKENIZER)] == [0]


REFUSED = [
    ({"train": {"max_steps": None, "epochs": 1}}, "data.streaming: the number of rows is not known"),
    ({"data": {"validation": 0.1}}, "data.validation: rows cannot be held out"),
    ({"task": "dpo"}, "data.streaming: task dpo needs all rows before it begins"),
    ({"train": {"batch_unit": "tokens", "global_batch_size": 64}}, "train.batch_unit: a step is found without"),
    ({"data": {"deduplicate": True}}, "data.deduplicate: needs all rows before training begins"),
    ({"data": {"streaming": {"disk_gb": 0.001}}}, "data.streaming.disk_gb: the shards of five steps may take"),
    ({"data": {"train": [{"source": "a.jsonl"}, {"source": "b.jsonl"}]}}, "data.mixing: sources are read one after"),
    ({"data": {"stages": [{"weights": {"a.jsonl": 1}}]}}, "data.stages: sources that are read while training"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_cannot_be_combined_is_refused(sections: dict[str, Any], message: str) -> None:
    sections = {**sections, "data": {"streaming": {}, **sections.get("data", {})}}
    with pytest.raises(RequestError) as error:
        recipe("a.jsonl", **sections)
    assert message in str(error.value)


def test_true_and_false_are_understood() -> None:
    assert recipe("a.jsonl", data={"streaming": False}).data.streaming is None
    streaming = recipe("a.jsonl", data={"streaming": True}).data.streaming
    assert streaming is not None and streaming.buffer_size == 10_000
