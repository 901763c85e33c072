"""Validation sets with names: each is measured as if it were alone, on any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ON_ROWS, ROWS, TINY, Runs, difference, events
from tests.support.training import Case, train
from trainwright.data.stream.dataset_cache import list_validation_parts, prepare
from trainwright.data.stream.stream import SetSizes
from trainwright.errors import RequestError
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.data import DataSection

SETS = f"data.validation={{near: '{ROWS}[:11]', held: 9, far: {{source: '{ROWS}', limit: 5, system: Be kind.}}}}"
SMALL = (ON_ROWS, "train.max_steps=4", "train.mixed_precision=no", "model.dropout=0", "evaluate.every=2")
NAMES = ("near", "held", "far")


def test_each_set_is_measured_as_if_it_were_alone(runs: Runs, tmp_path: Path) -> None:
    one = (*SMALL, "parallel.strategy=single")
    alone = {"near": f"data.validation={ROWS}[:11]", "held": "data.validation=9"}
    cases: dict[Any, Case] = {name: Case((*one, validation)) for name, validation in alone.items()}
    cases |= {"sets": Case((*one, SETS)), "main": Case((*one, SETS, "evaluate.main_set=near"))}
    cases |= {part: Case((*one, SETS), part, str(tmp_path)) for part in (3, None)}
    trained = train(runs, cases, 1)
    sets = trained["sets"].metrics()
    assert [*sets[0]] == ["loss", "perplexity", "token_accuracy"] + [
        f"{name}/{metric}" for name in NAMES for metric in ("loss", "perplexity", "token_accuracy")
    ]
    # Rows are held out for the one set only, so all runs but that of `near` alone are of the same training rows.
    own = [{metric: values[f"held/{metric}"] for metric in ("loss", "perplexity")} for values in sets]
    assert own == [{key: values[key] for key in ("loss", "perplexity")} for values in trained["held"].metrics()]
    first = trained["near"].metrics()[0]  # of the untrained model
    assert {metric: sets[0][f"near/{metric}"] for metric in first} == first
    for values in sets:
        assert (
            min(values[f"{name}/loss"] for name in NAMES)
            < values["loss"]
            < max(values[f"{name}/loss"] for name in NAMES)
        )
    for main, values in zip(trained["main"].metrics(), sets, strict=True):
        assert main == {**values, **{metric: values[f"near/{metric}"] for metric in first}}
    assert [*trained[3].metrics(), *trained[None].metrics()] == sets
    two = train(runs, {s: Case((*SMALL, SETS, f"parallel.strategy={s}")) for s in ("ddp", "fsdp")}, 2)
    for strategy, other in two.items():
        for values, expected in zip(other.metrics(), sets, strict=True):
            assert values.keys() == expected.keys()
            assert difference([*values.values()], [*expected.values()]) < 1e-4, strategy  # perplexities are of 300
            losses = [key for key in values if key.endswith("loss")]
            assert difference([values[key] for key in losses], [expected[key] for key in losses]) < 1e-5, strategy


@pytest.mark.slow
def test_the_main_set_decides_what_the_best_checkpoint_is(runs: Runs) -> None:
    learned = f"data.validation={{far: '{ROWS}[:20]', near: 8}}"
    run = runs.trained(*SMALL, learned, "evaluate.main_set=far", "evaluate.early_stopping={patience: 2}")
    values = [event["metrics"] for event in events(run, "evaluate")]
    assert all(metrics["loss"] == metrics["far/loss"] != metrics["near/loss"] for metrics in values)
    (start,) = events(run, "start")
    assert "validation sets: 20 of far, 8 of near" in start["data"]
    console = (run / "events.jsonl").read_text()
    assert "near/loss" in console
    ended = runs.command("eval", str(run)).wait()  # the rows of all sets
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "28" in ended.stdout


@pytest.mark.slow
def test_sets_of_a_pretraining_run(runs: Runs, tmp_path: Path) -> None:
    for name in ("text", "other"):
        lines = [json.dumps({"text": f"{name} number {n} of the rows, which are short"}) for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    text, other = tmp_path / "text.jsonl", tmp_path / "other.jsonl"
    settings = (
        "task=pretrain",
        f"data.train={text}",
        "data.max_length=32",
        "train.max_steps=2",
        "parallel.strategy=single",
        "evaluate.prompts=[]",
    )
    cases = {
        "sets": Case((*settings, f"data.validation={{own: 5, other: {other}}}")),
        "own": Case((*settings, "data.validation=5")),
    }
    trained = train(runs, cases, 1)
    values, alone = trained["sets"].metrics()[-1], trained["own"].metrics()[-1]
    assert {metric: values[f"own/{metric}"] for metric in alone} == alone
    assert values["other/loss"] > values["own/loss"]


def test_a_step_is_of_one_set() -> None:
    sizes = SetSizes(4, {"a": 9, "b": 4, "c": 1})
    assert [(sizes.before(step), sizes.at(step), sizes.set_of(step)) for step in range(sizes.count_steps_for(14))] == [
        (0, 4, "a"),
        (4, 4, "a"),
        (8, 1, "a"),
        (9, 4, "b"),
        (13, 1, "c"),
    ]


def test_rows_are_stored_set_after_set(tmp_path: Path) -> None:
    sets = {"near": f"{ROWS}[:3]", "held": 4, "far": {"source": str(ROWS), "limit": 2}}
    data = DataSection.model_validate({"train": str(ROWS), "validation": sets, "max_length": 512})
    found = prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path)
    assert found.sets == {"near": 3, "held": 4, "far": 2} and found.validation is not None
    assert len(found.validation) == 9
    parts = [key for _, key in list_validation_parts(data)]
    assert parts == ["data.validation.near", "data.train", "data.validation.far"]
    held = found.held_out()
    assert held[:, 0].tolist() == [0] * 3 + [1] * 4 + [2] * 2
    assert held[held[:, 0] == 0, 1].tolist() == [0, 1, 2] and held[held[:, 0] == 2, 1].tolist() == [0, 1]
    alone = prepare(data.model_copy(update={"validation": 4}), build_bytes_tokenizer(), seed=0, cache=tmp_path)
    assert alone.sets == {} and held[held[:, 0] == 1, 1].tolist() == alone.held_out()[:, 1].tolist()
    again = prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path)
    assert again.sets == found.sets and again.validation is not None
    assert again.validation.fingerprint == found.validation.fingerprint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.validation={a: 5, b: 0.1}",), "data.validation: expected at most one set of rows of train"),
        (("data.validation={a/b: 5}",), "a name of letters, digits, _ and -"),
        (("data.validation={}",), "data.validation"),
        (("data.validation={a: {source: x, weight: 2}}",), "data.validation.a.weight: unknown key"),
        (("data.validation={a: {sources: x}}",), "data.validation.a.sources: unknown key; did you mean"),
        (("data.validation={a: {format: cvs, source: x}}",), "data.validation.a.format: expected"),
        (("evaluate.main_set=a",), "data.validation has no named sets"),
        (("data.validation={a: 5}", "evaluate.main_set=b"), "evaluate.main_set: is none of the sets"),
        (("data.limit=5", "data.validation={a: 5}"), "data.validation: holds out 5 of the 5 rows"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError) as error:
        load_recipe(TINY, [ON_ROWS, *words])
    assert message in str(error.value)


def test_a_set_without_rows_is_named(tmp_path: Path) -> None:
    data = DataSection.model_validate({"train": str(ROWS), "validation": {"far": str(tmp_path / "none.jsonl")}})
    with pytest.raises(RequestError, match=r"data\.validation\.far: "):
        prepare(data, build_bytes_tokenizer(), seed=0, cache=tmp_path)
