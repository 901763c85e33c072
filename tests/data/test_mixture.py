from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.data.stream.stream import Stream, StreamSettings
from trainwright.data.tokens.dataset import MixturePart, compute_shares, divide_epoch, draw_examples
from trainwright.data.tokens.lengths import count_lengths
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.loading import build_recipe
from trainwright.recipe.sections.data import DataSection


def source(path: Path, count: int, text: str = "") -> str:
    rows = [{"question": f"{path.stem} {n}?", "answer": text or "yes"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path: Path, *sources: dict[str, Any], seed: int = 0, **data: Any) -> PreparedData:
    section = DataSection.model_validate({"train": list(sources), "validation": None, **data})
    return prepare(section, build_bytes_tokenizer(), seed=seed, cache=tmp_path / "cache")


def names(found: PreparedData, examples: list[int]) -> list[str]:
    texts = [build_bytes_tokenizer().decode(found.train.sequence(i)[0]) for i in examples]
    return [text.split("user\n")[1].split("?")[0] for text in texts]


def stream(found: PreparedData, size: int = 8, **options: Any) -> Stream:
    given: dict[str, Any] = {"seed": 0, "rows": 2, "total_examples": 10**6, **options}
    return Stream(found.train, StreamSettings(global_batch_size=size, **given))


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (10, [1, 1], [5, 5]),
        (10, [2, 1], [7, 3]),
        (11, [1, 1], [6, 5]),
        (7, [0.5, 0.25, 0.25], [3, 2, 2]),
        (1, [9, 1], [1, 0]),
    ],
)
def test_shares_are_the_weights_and_add_up(total: int, weights: list[float], expected: list[int]) -> None:
    assert compute_shares(total, weights) == expected


def test_every_epoch_has_the_shares_and_no_example_is_seen_twice_more_than_another() -> None:
    parts = divide_epoch([30, 7, 63], [1, 1, 2])
    assert [part.drawn for part in parts] == [25, 25, 50]
    seen: Counter[int] = Counter()
    for epoch in range(9):
        examples = draw_examples(parts, epoch, "key")
        of_parts = [((examples >= begin) & (examples < end)).sum() for begin, end in ((0, 30), (30, 37), (37, 100))]
        assert of_parts == [25, 25, 50]
        seen.update(examples.tolist())
        for begin, end in ((0, 30), (30, 37), (37, 100)):
            counts = [seen[i] for i in range(begin, end)]
            assert max(counts) - min(counts) <= 1
    assert draw_examples(parts, 4, "key").tolist() == draw_examples(parts, 4, "key").tolist()
    assert draw_examples(parts, 4, "key").tolist() != draw_examples(parts, 4, "other").tolist()
    three = (MixturePart(3, 3),)
    assert draw_examples(three, 0, "k").tolist() != [] and sorted(draw_examples(three, 5, "k").tolist()) == [0, 1, 2]


@pytest.mark.slow
def test_a_run_sees_the_sources_by_their_weights_whatever_divides_it(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a.jsonl", 60), source(tmp_path / "b.jsonl", 20)
    found = run(tmp_path, {"source": a, "weight": 1}, {"source": b, "weight": 3})
    assert len(found.train) == 80
    one = stream(found)
    epoch = [name for step in range(10) for name in names(found, one.examples(step))]
    assert Counter(name.split()[0] for name in epoch) == {"a": 20, "b": 60}
    assert set(Counter(name for name in epoch if name[0] == "b").values()) == {3}
    # All of a is seen in three epochs, and nothing of it twice before.
    three = [name for step in range(30) for name in names(found, one.examples(step)) if name[0] == "a"]
    assert len(three) == len(set(three)) == 60
    # The stream is the same however it is dealt, and from wherever it goes on.
    again = stream(found, rows=5)
    assert [again.examples(step) for step in (17, 3, 12)] == [one.examples(step) for step in (17, 3, 12)]
    batch = one.global_batch(4)
    for size in (1, 2, 3, 8):
        dealt = [
            i
            for rank in range(size)
            for micro in batch.select_for_rank(rank, size)
            if micro.weight
            for i in micro.examples
        ]
        assert Counter(dealt) == Counter(one.examples(4))
    assert one.seen() == list(range(80))
    assert stream(found, total_examples=8).seen() == sorted(set(one.examples(0)))
    assert "mixture: 60 of the 80 examples per epoch (75.0%) are from the 20 of" in "\n".join(found.summary)


def test_a_mixture_is_what_its_rows_and_weights_are(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a.jsonl", 12), source(tmp_path / "b.jsonl", 8)
    fingerprints = {
        run(tmp_path, *parts).train.fingerprint
        for parts in (
            ({"source": a}, {"source": b}),
            ({"source": a, "weight": 2}, {"source": b}),
            ({"source": b}, {"source": a}),
            ({"source": a, "limit": 5}, {"source": b}),
        )
    }
    assert len(fingerprints) == 4
    twice = run(tmp_path, {"source": a, "weight": 2}, {"source": b, "weight": 2})
    assert twice.train.fingerprint == run(tmp_path, {"source": a}, {"source": b}).train.fingerprint


@pytest.mark.parametrize(("validation", "of_each"), [(0.25, (15, 5)), (8, (2, 6))])
def test_each_source_gives_rows_to_validate_on(tmp_path: Path, validation: float, of_each: tuple[int, int]) -> None:
    parts = ({"source": source(tmp_path / "a.jsonl", 60)}, {"source": source(tmp_path / "b.jsonl", 20), "weight": 3})
    found = run(tmp_path, *parts, validation=validation)
    assert found.validation is not None and found.validation.mixture is None
    texts = [build_bytes_tokenizer().decode(found.validation.sequence(i)[0]) for i in range(len(found.validation))]
    assert (sum("a " in text for text in texts), sum("b " in text for text in texts)) == of_each
    named = [f"{'ab'[part]} {number}?" for part, number in found.held_out().tolist()]
    assert [text.split("user\n")[1].split("<")[0] for text in texts] == named
    assert len(found.train) == 80 - sum(of_each)


def test_a_validation_source_beside_a_mixture(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a.jsonl", 6), source(tmp_path / "b.jsonl", 6)
    found = run(tmp_path, {"source": a}, {"source": b}, validation=a)
    assert found.validation is not None and len(found.validation) == 6
    assert "validation: 6 of its examples are also trained on" in found.summary


def test_texts_and_conversations_in_one_mixture(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "one.md").write_text("word " * 100)
    parts = ({"source": str(tmp_path / "docs")}, {"source": source(tmp_path / "a.jsonl", 5)})
    found = run(tmp_path, *parts, max_length=64)
    assert found.train.report["format"] == "question_answer"
    assert [part["format"] for part in found.train.report["parts"]] == ["text", "question_answer"]
    assert found.train.mixture == (MixturePart(8, 7), MixturePart(5, 6))


def test_lengths_are_those_of_what_is_drawn(tmp_path: Path) -> None:
    short, long = source(tmp_path / "a.jsonl", 50, "x"), source(tmp_path / "b.jsonl", 50, "y" * 300)
    heavy = count_lengths(run(tmp_path, {"source": short}, {"source": long, "weight": 9}).train)
    light = count_lengths(run(tmp_path, {"source": short, "weight": 9}, {"source": long}).train)
    assert heavy.examples == light.examples == 100
    assert heavy.mean == pytest.approx(0.1 * light.quantiles[0] + 0.9 * heavy.longest, rel=0.05)
    assert heavy.mean > 3 * light.mean


def test_what_cannot_be_mixed_is_refused_with_its_key(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a.jsonl", 5), source(tmp_path / "b.jsonl", 5)
    with pytest.raises(RequestError, match=r"data\.train\[1\]\.weight: is too small"):
        run(tmp_path, {"source": a, "weight": 1000}, {"source": b})
    (tmp_path / "bad.jsonl").write_text('{"question": "", "answer": "a"}\n')
    with pytest.raises(RequestError, match=r"data\.train\[1\]: .*bad\.jsonl:1: the field question is empty"):
        run(tmp_path, {"source": a}, {"source": str(tmp_path / "bad.jsonl")})


def test_sources_put_after_one_another_are_each_used_once_in_an_epoch(tmp_path: Path) -> None:
    sources = [{"source": source(tmp_path / f"{name}.jsonl", count)} for name, count in (("a", 30), ("b", 7))]
    found = run(tmp_path, *sources, mixing="concatenate")
    assert [(part.examples, part.drawn) for part in found.train.mixture or ()] == [(30, 30), (7, 7)]
    for epoch in range(3):
        seen = draw_examples(found.train.mixture or (), epoch, "key")
        assert sorted(seen.tolist()) == list(range(37))
    held = run(tmp_path, *sources, mixing="concatenate", validation=10)
    assert [part.examples for part in held.train.mixture or ()] == [22, 5]


@pytest.mark.parametrize("sizes", [[3, 1], [7, 11, 13], [10**9 + 7, 1], [1, 2**40 + 1, 3]])
def test_shares_by_size_are_the_sizes_exactly(sizes: list[int]) -> None:
    data = DataSection.model_validate({"train": [{"source": f"{n}"} for n in sizes], "mixing": "concatenate"})
    assert [part.drawn for part in divide_epoch(sizes, data.weights(sizes))] == sizes


def test_a_temperature_makes_small_sources_larger(tmp_path: Path) -> None:
    data = {"train": [{"source": "a"}, {"source": "b", "weight": 2}], "mixing": 2}
    weights = DataSection.model_validate(data).weights([900, 100])
    assert weights == [30.0, 20.0]
    assert DataSection.model_validate({**data, "mixing": 1}).weights([900, 100]) == [900.0, 200.0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{train: [{source: a, weight: 2}, {source: b}], mixing: concatenate}", "every example is used once"),
        ("{train: a.jsonl, mixing: concatenate}", "is for several sources"),
        ("{train: a.jsonl, mixing: 0.5}", "weights, concatenate, or a temperature of at least 1"),
    ],
)
def test_a_mixing_that_has_no_meaning_is_refused(data: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        build_recipe(["task=sft", "model.name=some/model", f"data={data}"], "test")
    assert said in str(refused.value)
