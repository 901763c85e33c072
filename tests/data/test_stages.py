"""Stages of a run: which rows each step has, counted from the rows themselves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.data.stream.dataset_cache import PreparedData, prepare
from trainwright.data.stream.stream import Stream
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.planning.facts import build_facts, compute_stage_lengths, find_largest_stage
from trainwright.recipe.loading import build_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.language_model import add_stages, stream_of

SIZES = {"web": 60, "code": 24, "math": 10}
STAGES = [
    {"until": "7 steps", "weights": {"web": 0.8, "code": 0.2}},
    {"until": "19 steps", "weights": {"web": 1, "code": 2, "math": 1}},
    {"weights": {"code": 1, "math": 3}},
]


def sources(directory: Path, **long: int) -> list[dict[str, Any]]:
    """Rows that say their source and number; `long` has the characters of a source's answers."""
    for name, count in SIZES.items():
        rows = [{"question": f"{name} {n}?", "answer": "x" * long.get(name, 1 + n % 5)} for n in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"source": str(directory / f"{name}.jsonl"), "name": name} for name in SIZES]


def recipe(rows: list[dict[str, Any]], stages: Any = STAGES, task: str = "sft", **sections: Any) -> RecipeSchema:
    data = {"train": rows, "validation": None, "max_length": 128, "stages": stages, **sections.pop("data", {})}
    train = {"max_steps": 40, "global_batch_size": 8, **sections.pop("train", {})}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256}
    model = {"config": {"model_type": "gpt2", **sizes}, "tokenizer": "bytes"}
    tree = {"task": task, "model": model, "data": data, "train": train, **sections}
    return build_recipe([f"{key}={json.dumps(value)}" for key, value in tree.items()], "the test")


def prepared(asked: RecipeSchema, tmp_path: Path) -> PreparedData:
    return prepare(asked.data, build_bytes_tokenizer(), seed=asked.train.seed, cache=tmp_path / "cache")


def stream(asked: RecipeSchema, found: PreparedData) -> Stream[Any]:
    return stream_of(asked, found.train, 0, training=True, shuffle=True)


def row_names(found: PreparedData, examples: list[int]) -> list[str]:
    texts = [build_bytes_tokenizer().decode(found.train.sequence(i)[0]) for i in examples]
    return [text.split("user\n")[1].split("?")[0] for text in texts]


def joined(steps: Iterable[list[str]]) -> list[str]:
    return [name for step in steps for name in step]


def counts(names: list[str]) -> dict[str, int]:
    return dict(Counter(name.split()[0] for name in names))


def test_every_stage_has_its_shares_of_rows_and_sources_go_on_where_they_stopped(tmp_path: Path) -> None:
    asked = recipe(sources(tmp_path))
    found = prepared(asked, tmp_path)
    run = stream(asked, found)
    assert len(run) == 40 and run.total_examples == 320
    steps = [row_names(found, run.examples(step)) for step in range(40)]
    assert {len(step) for step in steps} == {8}
    assert run.seen() == sorted({example for step in range(40) for example in run.examples(step)})
    stages = [joined(steps[begin:end]) for begin, end in ((0, 7), (7, 19), (19, 40))]
    assert counts(stages[0]) == {"web": 45, "code": 11}
    assert counts(stages[1]) == {"web": 24, "code": 48, "math": 24}
    assert counts(stages[2]) == {"code": 42, "math": 126}
    # In any number of steps of a stage, no source has a row more or less than its share.
    for step in range(7, 19):
        so_far = counts(joined(steps[7 : step + 1]))
        assert abs(so_far["code"] - (step - 6) * 4) < 1 and abs(so_far["math"] - (step - 6) * 2) < 1
    # A source goes through all of its rows before it begins again, across the borders of stages.
    for name, size in SIZES.items():
        its = [row for step in steps for row in step if row.startswith(f"{name} ")]
        for begin in range(0, len(its), size):
            round_ = its[begin : begin + size]
            assert len(set(round_)) == len(round_), name
        assert its[:size] != its[size : 2 * size] or len(its) < 2 * size


def test_a_step_is_the_same_whatever_was_asked_before_and_for_another_seed_another(tmp_path: Path) -> None:
    rows = sources(tmp_path)
    asked = recipe(rows)
    found = prepared(asked, tmp_path)
    one = [stream(asked, found).examples(step) for step in range(40)]
    fresh = stream(asked, found)
    assert [fresh.examples(step) for step in (39, 3, 18, 19, 7, 6)] == [one[step] for step in (39, 3, 18, 19, 7, 6)]
    longer = stream(recipe(rows, train={"max_steps": 400}), found)
    assert [longer.examples(step) for step in range(40)] == one
    other = stream(recipe(rows, train={"seed": 1}), found)
    assert [other.examples(step) for step in range(40)] != one


@pytest.mark.parametrize("unit", ["examples", "packs", "tokens"])
def test_tokens_end_a_stage_with_the_step_that_reaches_them(tmp_path: Path, unit: str) -> None:
    stages = [
        {"until": "1.5k tokens", "weights": {"web": 1}},
        {"until": "30 steps", "weights": {"code": 1}},
        {"until": "9_000 tokens", "weights": {"math": 1}},
        {"weights": {"web": 1, "code": 1}},
    ]
    sizes = {"examples": 4, "packs": 2, "tokens": 128}
    train = {"max_steps": None, "max_tokens": 12_000, "batch_unit": unit, "global_batch_size": sizes[unit]}
    asked = recipe(sources(tmp_path), stages, train=train, data={"pack_length": 128 if unit == "packs" else None})
    found = prepared(asked, tmp_path)
    run = stream(asked, found)
    lengths = found.train.example_lengths()
    tokens, kinds = 0, []
    for step in range(len(run)):
        expected = (
            "web" if tokens < 1500 else "code" if step < 30 else "math" if tokens < 9000 else None  # both
        )
        examples = run.examples(step)
        kind = counts(row_names(found, examples))
        assert expected is None or set(kind) == {expected}, step
        kinds.append(expected)
        assert tokens < 12_000
        tokens += int(lengths[examples].sum())
        if unit == "tokens":
            assert sum(lengths[i] for i in examples) <= 128
    assert tokens >= 12_000
    assert [kind for kind, before in zip(kinds[1:], kinds, strict=False) if kind != before] == ["code", "math", None]
    lines = add_stages(asked, found).summary
    first = kinds.index("code")
    assert any(line.startswith(f"stage 1: steps 1 to {first}, ") and "of web" in line for line in lines)


def test_stages_without_weights_have_those_of_the_sources(tmp_path: Path) -> None:
    rows = sources(tmp_path)
    rows[0]["weight"] = 2.0
    asked = recipe(rows, [{"until": "4 steps", "weights": {"math": 1}}, {}])
    found = prepared(asked, tmp_path)
    run = stream(asked, found)
    second = joined(row_names(found, run.examples(step)) for step in range(4, 40))
    assert counts(second) == {"web": 144, "code": 72, "math": 72}
    every_row = stream(
        recipe(sources(tmp_path), [{"until": "4 steps", "weights": {"math": 1}}, {}], data={"mixing": "concatenate"}),
        found,
    )
    second = joined(row_names(found, every_row.examples(step)) for step in range(4, 40))
    assert counts(second) == {"web": 184, "code": 73, "math": 31}


def test_a_run_that_ends_early_says_which_stages_it_has_not(tmp_path: Path) -> None:
    asked = recipe(sources(tmp_path), train={"max_steps": 9})
    lines = add_stages(asked, prepared(asked, tmp_path)).summary
    assert "stage 2: steps 8 to 9, 16 examples: 4 of web, 8 of code, 4 of math" in lines
    assert "stage 3: the run ends before it" in lines
    assert not any(line.startswith("mixture") for line in lines)


def test_a_stage_that_ends_before_it_begins_is_refused(tmp_path: Path) -> None:
    stages = [{"until": "30 steps", "weights": {"web": 1}}, {"until": "1k tokens"}, {}]
    asked = recipe(sources(tmp_path), stages)
    with pytest.raises(RequestError, match=r"data.stages\[1\].until: is reached by step 30, before the stage begins"):
        add_stages(asked, prepared(asked, tmp_path))


@pytest.mark.parametrize(
    ("stages", "changes", "message"),
    [
        ([{"until": "5 steps"}], {}, "data.stages[0].until: the last stage lasts to the end of the run"),
        ([{}, {}], {}, "data.stages[0].until: is missing"),
        ([{"until": "5 epochs"}, {}], {}, "a number of steps or tokens since the first step"),
        ([{"until": "1.0005k steps"}, {}], {}, "a number of steps or tokens since the first step"),
        ([{"until": "5 steps"}, {"until": "4 steps"}, {}], {}, "data.stages[1].until: is not later than"),
        ([{"weights": {"wbe": 1}}], {}, "wbe is no source of data.train, whose sources are web, code, math"),
        ([{"weights": {"web": 0}}], {}, "at least one source with a weight above 0"),
        ([{"weights": {"web": 1, "code": 1}}], {}, "data.train[2]: is used in no stage"),
        (
            [{"weights": dict.fromkeys(SIZES, 1)}],
            {"data": {"mixing": 2}},
            "data.mixing: has no effect beside data.stages",
        ),
        ([{}], {"train": {"max_steps": None, "epochs": 1}}, "set train.max_steps or train.max_tokens"),
        ([{"max_length": 64}], {}, "data.stages[0].max_length: divides windows of a corpus"),
        (None, {}, "data.train[0].name: has no effect without data.stages"),
    ],
)
def test_wrong_stages_are_refused(tmp_path: Path, stages: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        recipe(sources(tmp_path), stages, **changes)
    assert message in str(error.value)


def test_a_plan_has_the_largest_stage_and_the_time_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    rows = sources(tmp_path, web=10, code=90, math=10)
    stages = [{"until": "30 steps", "weights": {"web": 1}}, {"weights": {"code": 1}}]
    asked = recipe(rows[:2], stages, task="sft")
    guess = build_facts(asked)
    assert guess.estimated and guess.workload.steps == 40
    from trainwright.tasks.language_model import prepare_data

    found = prepare_data(asked, build_bytes_tokenizer(), tmp_path / "cache")
    facts = build_facts(asked)
    assert not facts.estimated
    lengths = found.train.example_lengths()
    short, long = lengths[:60], lengths[60:]
    assert facts.workload.longest_document == long.max()
    assert facts.workload.document_tokens == pytest.approx((30 * short.mean() + 10 * long.mean()) / 40, rel=0.01)
    assert facts.workload.most_batch_tokens == pytest.approx(8 * long.mean(), rel=0.02)
    run = stream(asked, found)
    tokens = sum(int(lengths[run.examples(step)].sum()) for step in range(40))
    assert facts.workload.batch_tokens == pytest.approx(tokens / 40, rel=0.01)
    assert find_largest_stage(asked).weights == {"code": 1}
    # Without its last stage, the run has only short examples.
    early = build_facts(recipe(rows[:2], stages, train={"max_steps": 20})).workload
    assert early.longest_document == short.max()


def test_a_plan_counts_steps_and_tokens_alike(tmp_path: Path) -> None:
    from trainwright.data.tokens.lengths import Lengths

    stages = [{"until": "10 steps"}, {"until": "40k tokens"}, {}]
    asked = recipe(sources(tmp_path), stages, train={"max_steps": None, "max_tokens": 60_000})
    parts = [Lengths((size,), None, 1.0) for size in (50, 100, 200)]
    examples = [count for _, count in compute_stage_lengths(asked, parts)]
    assert examples == pytest.approx([80, 360, 100])
    assert np.isclose(sum(n * part.mean for n, part in zip(examples, parts, strict=True)), 60_000)
