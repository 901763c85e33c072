"""Unlearning as a run does it: the same on any machine, under any strategy, with every objective."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.inference.evaluation.unlearning.benchmark import write_tofu
from tests.support.runs import Runs, column, difference, events
from tests.support.slow import slow_but
from tests.support.unlearning import OBJECTIVES, write_rows
from trainwright.planning.facts import Facts, build_facts
from trainwright.recipe.loading import load_recipe
from trainwright.tasks.unlearn.task import prepare_once

DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'deepspeed==0.19.*'"
)

ONE, TWO = "parallel.num_processes=1", "parallel.num_processes=2"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("unlearning"))


@pytest.fixture(scope="module")
def knowing(runs: Runs, recipe: Path) -> tuple[str, ...]:
    """What has a run start from a model that has learned all rows."""
    final = runs.trained(ONE, recipe=recipe.with_name("know.yaml")) / "final"
    return (f"model.name={final}", "model.config=null", "model.tokenizer=null")


def run_of(runs: Runs, recipe: Path, objective: str, *overrides: str) -> Path:
    return runs.trained(f"unlearn.objective={objective}", *OBJECTIVES[objective], *overrides, recipe=recipe)


def measured(run: Path) -> list[dict[str, float]]:
    return [event["metrics"] for event in events(run, "evaluate")]


def assert_same(found: Path, expected: Path) -> None:
    assert column(found, "tokens") == column(expected, "tokens")
    assert difference(column(found, "loss"), column(expected, "loss")) < 1e-5
    assert difference(column(found, "grad_norm"), column(expected, "grad_norm")) < 1e-4
    assert len(measured(found)) == len(measured(expected)) == 3
    for one, other in zip(measured(found), measured(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


ELSEWHERE = [
    pytest.param((ONE, "train.micro_batch_size=5"), id="larger micro-batches", marks=pytest.mark.slow),
    pytest.param((ONE, "data.pack_length=null"), id="padded", marks=pytest.mark.slow),
    pytest.param((TWO, "parallel.strategy=ddp"), id="ddp", marks=pytest.mark.slow),
    pytest.param((TWO, "parallel.strategy=fsdp"), id="fsdp"),
    pytest.param((TWO, "parallel.strategy=zero3"), id="zero3", marks=[DEEPSPEED, pytest.mark.slow]),
]


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_npo_is_the_same_run_anywhere(runs: Runs, recipe: Path, elsewhere: tuple[str, ...]) -> None:
    assert_same(run_of(runs, recipe, "npo", *elsewhere), run_of(runs, recipe, "npo", ONE))


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "npo"])
def test_every_objective_is_the_same_run_anywhere(
    runs: Runs, recipe: Path, knowing: tuple[str, ...], objective: str, elsewhere: tuple[str, ...]
) -> None:
    there = run_of(runs, recipe, objective, *knowing, *elsewhere)
    assert_same(there, run_of(runs, recipe, objective, *knowing, ONE))


@pytest.fixture(scope="module")
def watched(recipe: Path) -> str:
    """What has a run measure truth ratios on its way."""
    return f"data.benchmark={write_tofu(recipe.with_name('tofu'))}"


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ELSEWHERE[2:])
def test_truth_ratios_on_the_way_are_the_same_anywhere(
    runs: Runs, recipe: Path, watched: str, elsewhere: tuple[str, ...]
) -> None:
    found = run_of(runs, recipe, "npo", watched, *elsewhere)
    assert_same(found, run_of(runs, recipe, "npo", watched, ONE))
    assert all({"forget_truth_ratio", "retain_truth_ratio"} <= set(metrics) for metrics in measured(found))


# The losses of all are compared with their formulas in fast tests.
@pytest.mark.parametrize("objective", slow_but("undial", among=OBJECTIVES))
def test_every_objective_does_what_it_says(runs: Runs, recipe: Path, knowing: tuple[str, ...], objective: str) -> None:
    first, *_, last = measured(run_of(runs, recipe, objective, *knowing, ONE))
    assert all(math.isfinite(value) for value in last.values())
    assert last["loss"] < first["loss"]
    if objective == "task_vector":  # what it subtracts it learns first
        assert last["forget_nll"] < first["forget_nll"]
    elif objective not in ("rmu", "idk_nll"):
        assert last["forget_nll"] > first["forget_nll"]


def test_a_retain_row_stands_beside_each_forget_row_and_none_much_more_often(runs: Runs, recipe: Path) -> None:
    run = run_of(runs, recipe, "npo", ONE)
    summary = "\n".join(events(run, "start")[0]["data"])
    assert "16 rows to forget, each paired with one of 24 rows to retain" in summary
    assert events(run, "start")[0]["epoch_examples"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("objective", slow_but("pdu", among=("npo", "undial", "pdu")))
def test_a_run_that_is_resumed_ends_with_the_same_losses(runs: Runs, recipe: Path, objective: str) -> None:
    whole = run_of(runs, recipe, objective, ONE)
    again = runs.copied(run_of(runs, recipe, objective, ONE, "checkpoint.every=3", "checkpoint.keep_last=9"))
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    shutil.rmtree(again / "final")
    runs.resumed(again)
    assert column(again, "loss") == column(whole, "loss")
    assert [step["metrics"] for step in events(again, "step")] == [step["metrics"] for step in events(whole, "step")]


@pytest.mark.slow
def test_every_alternate_is_preferred_to_the_answer_of_its_row(
    runs: Runs, recipe: Path, knowing: tuple[str, ...]
) -> None:
    run = run_of(runs, recipe, "altpo", *knowing, ONE)
    assert events(run, "start")[0]["epoch_examples"] == 16 + 8  # 8 of the 16 rows have two
    first, *_, last = measured(run)
    assert last["alternate_nll"] - first["alternate_nll"] < last["forget_nll"] - first["forget_nll"]
    assert first["forget_loss"] == pytest.approx(2 / 0.1 * math.log(2), rel=1e-4)  # the model is its own reference


@pytest.mark.slow
def test_a_plan_counts_the_tokens_of_all_alternates_as_the_run_does(
    runs: Runs, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the rows are prepared it estimates them, and after that it counts those of the same objective."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    lengths = ("data.max_length=160", "data.pack_length=null")

    def planned(objective: str) -> Facts:
        return build_facts(load_recipe(recipe, [f"unlearn.objective={objective}", *lengths]))

    estimated = {name: planned(name).workload.batch_tokens for name in ("altpo", "npo")}
    trained = {name: column(run_of(runs, recipe, name, ONE, *lengths), "tokens") for name in estimated}
    measured_tokens = {name: tokens[-1] / len(tokens) for name, tokens in trained.items()}
    assert estimated["altpo"] == pytest.approx(measured_tokens["altpo"], rel=0.2)
    more = measured_tokens["altpo"] / measured_tokens["npo"]
    assert estimated["altpo"] / estimated["npo"] == pytest.approx(more, rel=0.03)
    resolved = ["unlearn.objective=altpo", *lengths, ONE, "parallel.strategy=single"]
    assert prepare_once(load_recipe(recipe, resolved), tmp_path) == 16 + 8
    counted = planned("altpo")
    assert not counted.estimated and planned("dpo").estimated  # it has the same sources, and one refusal a row
    assert counted.workload.batch_tokens == pytest.approx(measured_tokens["altpo"], rel=0.05)


@pytest.mark.slow
def test_the_model_writes_the_alternates_and_continues_after_those_it_has(
    runs: Runs, recipe: Path, knowing: tuple[str, ...]
) -> None:
    out = recipe.with_name("alternates.jsonl")
    command = ("data", "alternates", str(recipe), *knowing, "--out", str(out), "--count", "2", "--max-new-tokens", "6")

    def written() -> list[dict[str, Any]]:
        ended = runs.command(*command).wait()
        assert ended.code == 0, ended.stderr
        return [json.loads(line) for line in out.read_text().splitlines()]

    first = written()
    asked = [json.loads(line) for line in recipe.with_name("forget.jsonl").read_text().splitlines()]
    assert [{**row, "alternate": None} for row in first] == [{**row, "alternate": None} for row in asked]
    assert all(len(row["alternate"]) == 2 for row in first)
    assert len({text for row in first for text in row["alternate"]}) > 16  # drawn, each anew
    out.write_text("".join(json.dumps(row) + "\n" for row in first[:5]))
    assert written()[:5] == first[:5] and len(written()) == len(asked)
    other = runs.command(*command[:-3], "3").wait()
    assert other.code == 2 and "has other rows, or another number of alternates" in other.stderr
    run = run_of(runs, recipe, "altpo", *knowing, ONE, f"data.forget={out}")
    assert events(run, "start")[0]["epoch_examples"] > 16


@pytest.mark.slow
def test_altpo_is_the_same_run_anywhere(runs: Runs, recipe: Path) -> None:
    two = run_of(runs, recipe, "altpo", TWO, "parallel.strategy=ddp", "train.micro_batch_size=1")
    assert_same(two, run_of(runs, recipe, "altpo", ONE))


@pytest.mark.slow
def test_an_ablation_names_no_best_run_by_the_loss(runs: Runs, recipe: Path, tmp_path: Path) -> None:
    command = ("ablate", str(recipe), "train.max_steps=1", ONE, "--over", "unlearn.gamma=1,2", "--grid", "--out", "out")
    ended = runs.command(*command, cwd=tmp_path).wait()
    assert ended.code == 0 and "gamma=2" in ended.stdout and "best" not in ended.stdout, ended.stdout + ended.stderr
    named = runs.command(*command, "--metric", "forget_probability", cwd=tmp_path).wait()
    assert named.code == 0 and "best: gamma=" in named.stdout, named.stdout + named.stderr
    halved = runs.command(*command, "--halving", "2", cwd=tmp_path).wait()
    assert halved.code == 2 and "--halving: the loss does not show which runs to continue" in halved.stderr


@pytest.mark.slow
def test_the_multiplier_of_pdu_moves_after_its_warm_up(runs: Runs, recipe: Path) -> None:
    steps = [step["metrics"] for step in events(run_of(runs, recipe, "pdu", ONE), "step")]
    assert [step["alpha"] for step in steps[:3]] == [1.0, 1.0, 1.0]
    # What a step reports was used in it; the one before moved it.
    for before, after in pairwise(steps[2:]):
        assert after["alpha"] == pytest.approx(max(0.0, before["alpha"] + before["retain_loss"] - 5.0))


@pytest.mark.slow
@pytest.mark.parametrize("objective", slow_but("undial", "task_vector", among=("npo", "undial", "rmu", "task_vector")))
def test_an_adapter_is_compared_with_its_base(
    runs: Runs, recipe: Path, knowing: tuple[str, ...], objective: str
) -> None:
    run = run_of(runs, recipe, objective, *knowing, ONE, "model.adapter={type: lora, rank: 4}")
    first, *_, last = measured(run)
    assert last["loss"] < first["loss"]
    assert (run / "final" / "adapter_model.safetensors").is_file()
    same = run_of(runs, recipe, objective, *knowing, ONE)
    assert measured(same)[0]["loss"] == pytest.approx(first["loss"], rel=1e-5)  # the same reference


@pytest.mark.slow
def test_a_task_vector_is_subtracted_from_the_start(runs: Runs, recipe: Path, knowing: tuple[str, ...]) -> None:
    from safetensors.torch import load_file

    run = run_of(runs, recipe, "task_vector", *knowing, ONE, "unlearn.scale=2")
    start = load_file(Path(knowing[0].removeprefix("model.name=")) / "model.safetensors")
    learned = load_file(next((run / "checkpoints" / "step-00000006").glob("*.safetensors")))
    final = load_file(run / "final" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    (found,) = (tensor for key, tensor in learned.items() if key.endswith(name) and key.startswith("model."))
    expected = start[name] - 2 * (found - start[name])
    assert float((final[name] - expected).abs().max()) < 1e-6
    assert float((final[name] - start[name]).abs().max()) > 1e-4


@pytest.mark.slow
def test_only_what_matches_is_trained(runs: Runs, recipe: Path, knowing: tuple[str, ...]) -> None:
    from safetensors.torch import load_file

    trained = r"model\.layers\.0\.mlp\.down_proj\.weight"
    run = run_of(runs, recipe, "rmu", *knowing, ONE, f"model.trainable=['{trained}']")
    start = load_file(Path(knowing[0].removeprefix("model.name=")) / "model.safetensors")
    final = load_file(run / "final" / "model.safetensors")
    changed = [name for name in start if not (start[name] == final[name]).all()]
    assert changed == ["model.layers.0.mlp.down_proj.weight"]


@pytest.mark.slow
def test_the_reference_may_be_another_model(runs: Runs, recipe: Path, knowing: tuple[str, ...]) -> None:
    other = knowing[0].removeprefix("model.name=")
    run = run_of(runs, recipe, "npo", ONE, f"unlearn.reference={other}")
    before = measured(run)[0]["forget_loss"]
    assert before < 0.9 * 20 * math.log(2)  # the reference gives the forget rows more than the fresh model does
    assert not any("reference" in name for name in _tensors(run / "final"))


def _tensors(directory: Path) -> list[str]:
    from safetensors.torch import load_file

    return list(load_file(directory / "model.safetensors"))
