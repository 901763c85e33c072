"""A run is the same on any number of processes, with any micro-batch, packed or not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.runs import ON_ROWS, ROOT, TINY, Runs, column, difference, events
from tests.support.slow import slow_but

GOLDEN = Path(__file__).parent / "golden" / "tiny.json"
NO_DROPOUT = "model.dropout=0"


def processes(count: int) -> str:
    return f"parallel.num_processes={count}"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` with an architecture that drops out embeddings and residuals too, not attention alone."""
    recipe = yaml.safe_load(TINY.read_text())
    recipe["model"]["config"] = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    }
    path = tmp_path_factory.mktemp("recipes") / "gpt2.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.parametrize("count", slow_but(2, among=(2, 3)))
def test_losses_do_not_depend_on_the_number_of_processes(runs: Runs, count: int) -> None:
    one, several = runs.trained(processes(1), ON_ROWS), runs.trained(processes(count), ON_ROWS)
    assert len(column(one, "loss")) == 30
    assert events(several, "start")[0]["world_size"] == count
    assert column(several, "tokens") == column(one, "tokens")
    assert column(several, "target_tokens") == column(one, "target_tokens")
    assert difference(column(several, "loss"), column(one, "loss")) < 1e-5
    assert difference(column(several, "grad_norm"), column(one, "grad_norm")) < 1e-4


def test_the_same_run_twice_is_bit_identical(runs: Runs) -> None:
    one = runs.trained(processes(2), ON_ROWS)
    again = runs.trained(processes(2), ON_ROWS, "train.seed=0")
    assert one != again
    assert column(again, "loss") == column(one, "loss")
    assert column(again, "grad_norm") == column(one, "grad_norm")


@pytest.mark.slow
def test_dropout_is_the_same_on_any_number_of_processes(runs: Runs, gpt2: Path) -> None:
    settings = (ON_ROWS, "train.micro_batch_size=1", "train.max_steps=12")
    one, two, three = (runs.trained(processes(count), *settings, recipe=gpt2) for count in (1, 2, 3))
    none = runs.trained(processes(1), *settings, NO_DROPOUT, recipe=gpt2)
    # So much that a single mask drawn otherwise would be seen.
    assert difference(column(none, "loss"), column(one, "loss")) > 2e-3
    assert difference(column(two, "loss"), column(one, "loss")) < 1e-5
    assert difference(column(three, "loss"), column(one, "loss")) < 1e-5


@pytest.mark.slow
def test_dropout_and_seed_change_the_losses(runs: Runs) -> None:
    with_dropout = runs.trained(processes(1))
    without = runs.trained(processes(1), NO_DROPOUT)
    assert column(with_dropout, "tokens") == column(without, "tokens")
    # Little, as this model drops out attention alone, and attention is nearly even when training begins.
    assert difference(column(with_dropout, "loss"), column(without, "loss")) > 1e-5
    other = runs.trained(processes(1), "train.seed=1", "train.max_steps=2")
    assert column(other, "tokens") != column(with_dropout, "tokens")[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("train.micro_batch_size=1",),
        ("train.micro_batch_size=4",),
        ("data.pack_length=null", "train.micro_batch_size=1"),
        ("data.pack_length=null", "train.micro_batch_size=2"),
        ("data.pack_length=null", "train.micro_batch_size=4"),
    ],
    ids=" ".join,
)
def test_without_dropout_neither_micro_batches_nor_packing_matter(runs: Runs, overrides: tuple[str, ...]) -> None:
    reference = runs.trained(processes(1), NO_DROPOUT)
    run = runs.trained(processes(1), NO_DROPOUT, *overrides)
    assert column(run, "tokens") == column(reference, "tokens")
    assert difference(column(run, "loss"), column(reference, "loss")) < 1e-5


@pytest.mark.slow
def test_accumulation_packing_and_processes_together_do_not_matter(runs: Runs) -> None:
    few = (NO_DROPOUT, ON_ROWS, "train.max_steps=12")
    one = runs.trained(processes(1), *few)
    padded = runs.trained(processes(3), *few, "data.pack_length=null", "train.micro_batch_size=1")
    packs = ("data.pack_length=512", "train.micro_batch_size=auto", "train.gradient_accumulation_steps=2")
    packed = runs.trained(processes(2), *few, *packs)
    assert events(padded, "start")[0]["gradient_accumulation_steps"] == 3
    for run in (padded, packed):
        assert column(run, "tokens") == column(one, "tokens")
        assert difference(column(run, "loss"), column(one, "loss")) < 1e-5


@pytest.mark.slow
def test_a_rank_with_one_long_example_keeps_step_with_ranks_that_have_many_short_ones(
    runs: Runs, tmp_path: Path
) -> None:
    rows = [{"question": f"{n}?", "answer": "x" * (400 if n % 6 == 0 else 1)} for n in range(60)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"data.train={data}",
        "data.limit=null",
        "data.validation=null",
        "data.max_length=512",
        "data.pack_length=null",
        "train.micro_batch_size=1",
        "train.global_batch_size=7",
        "train.max_steps=8",
    )
    one, three = (runs.trained(processes(count), *settings) for count in (1, 3))
    assert difference(column(three, "loss"), column(one, "loss")) < 1e-5


@pytest.mark.slow
def test_epochs_end_with_a_smaller_batch_and_see_every_example_once(runs: Runs) -> None:
    settings = (ON_ROWS, "train.max_steps=null", "train.epochs=1", "train.global_batch_size=32")
    one, two = (runs.trained(processes(count), *settings) for count in (1, 2))
    start = events(one, "start")[0]
    assert len(column(one, "loss")) == -(-start["epoch_examples"] // 32)
    assert column(one, "tokens")[-1] == start["epoch_tokens"]
    assert column(two, "tokens") == column(one, "tokens")
    assert difference(column(two, "loss"), column(one, "loss")) < 1e-5


@pytest.mark.slow
def test_bf16_runs_agree(runs: Runs) -> None:
    few = (NO_DROPOUT, ON_ROWS, "train.max_steps=12")
    fp32 = runs.trained(processes(1), *few)
    one = runs.trained(processes(1), *few, "train.mixed_precision=bf16")
    two = runs.trained(processes(2), *few, "train.mixed_precision=bf16")
    at_once = runs.trained(processes(1), *few, "train.mixed_precision=bf16", "train.micro_batch_size=8")
    assert events(one, "start")[0]["mixed_precision"] == "bf16"
    assert events(at_once, "start")[0]["gradient_accumulation_steps"] == 1
    assert column(one, "loss") != column(fp32, "loss")
    for run in (two, at_once, fp32):
        assert column(run, "tokens") == column(one, "tokens")
        assert difference(column(run, "loss"), column(one, "loss")) < 2e-2


def test_the_golden_curve(runs: Runs) -> None:
    """Whoever changes the numbers on purpose writes the file anew: GOLDEN=write pytest -k golden_curve."""
    found: dict[str, Any] = {}
    for count in (1, 2):
        run = runs.trained(processes(count), ON_ROWS)
        found = {name: column(run, name) for name in ("loss", "tokens", "target_tokens", "learning_rate")}
        found["validation"] = [event["metrics"] for event in events(run, "evaluate")]
        if os.environ.get("GOLDEN") == "write" and count == 1:
            about = f"tiny.yaml on {Path(ON_ROWS.split('=')[1]).relative_to(ROOT)}; see test_same_run.py"
            GOLDEN.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")
        golden = json.loads(GOLDEN.read_text())
        assert found["tokens"] == golden["tokens"]
        assert found["target_tokens"] == golden["target_tokens"]
        assert found["learning_rate"] == pytest.approx(golden["learning_rate"], rel=1e-12, abs=1e-18)
        # Processors differ in how they sum, and 30 steps of training enlarge it.
        assert difference(found["loss"], golden["loss"]) < 1e-4
        for metrics, expected in zip(found["validation"], golden["validation"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-3)
