"""Unlearning in one process: what counts how much, references without dropout, negation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.unlearning import write_rows
from trainwright.machine.cache import find_cache_root
from trainwright.machine.detect import detect
from trainwright.recipe.loading import load_recipe
from trainwright.run.resolve import resolve
from trainwright.tasks.unlearn.losses import simnpo
from trainwright.tasks.unlearn.task import Unlearning, build, negate_adapter, negate_change

DEVICE = torch.device("cpu")
Make = Callable[..., Unlearning]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Tasks of a tiny recipe on rows to forget and rows to keep, with some overrides."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    recipe = write_rows(tmp_path / "rows")

    def made(*overrides: str) -> Unlearning:
        fixed = ["parallel.num_processes=1", f"logging.run_directory={tmp_path / 'run'}"]
        return build(resolve(load_recipe(recipe, [*fixed, *overrides]), detect()).recipe, find_cache_root())

    return made


@pytest.mark.parametrize("rows", [1, 5])
def test_each_of_the_two_losses_is_a_mean_of_its_own_over_the_global_batch(make: Make, rows: int) -> None:
    weights = ("unlearn.gamma=0.7", "unlearn.alpha=1.3")
    task = make("unlearn.objective=grad_diff", *weights, "data.pack_length=null", f"train.micro_batch_size={rows}")
    batch = task.stream.global_batch(0)
    task.before_passes(None, batch, validation=False)  # type: ignore[arg-type]
    parts = [task.loss(task.module, micro, DEVICE) for micro in batch.micro_batches]
    found = sum(float(part.total) for part in parts) / batch.weight
    sums: Any = torch.stack([part.statistics for part in parts if part.statistics is not None]).sum(0)
    forget, of_forget, retain, of_retain = sums[:4].tolist()
    dataset = task.stream.dataset
    sequences = [d for micro in batch.micro_batches for example in micro.examples for d in dataset.sequences(example)]
    assert of_forget + of_retain == sum(map(dataset.sequence_targets, sequences))
    assert found == pytest.approx(0.7 * forget / of_forget + 1.3 * retain / of_retain, rel=1e-5)
    assert task.metrics(sums.tolist())["loss"] == pytest.approx(found, rel=1e-5)


@pytest.mark.slow
def test_a_frozen_reference_never_drops_out(make: Make) -> None:
    task = make("unlearn.objective=grad_diff", "unlearn.retain_loss=kl", "model.dropout=0.5")
    lm = task._lm
    assert lm.reference is not None
    for training in (True, False):
        lm.train(training)
        assert all(part.training is training for part in lm.model.modules())
        assert not any(part.training for part in lm.reference.modules())


@pytest.mark.slow
def test_the_model_without_its_adapter_does_not_drop_out_as_a_reference(make: Make) -> None:
    adapter = "model.adapter={type: lora, rank: 4, dropout: 0.4}"
    task = make("unlearn.objective=grad_diff", "unlearn.retain_loss=kl", "model.dropout=0.5", adapter)
    lm = task._lm
    assert lm.reference is None
    lm.train()
    with lm.open_reference() as frozen:
        assert frozen is lm
        assert not any(part.training for part in lm.model.modules())
        assert not torch.is_grad_enabled()
    assert all(part.training for part in lm.model.modules())


def test_a_task_vector_is_taken_off_the_start() -> None:
    start, learned = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])
    found = dict(negate_change([("a", learned), ("frozen", learned)], {"a": start}, 0.5))
    assert found["a"].tolist() == [0.0, 2.5]
    assert found["frozen"] is learned


def test_an_adapter_that_is_negated_adds_the_opposite() -> None:
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    found = dict(negate_adapter([("x.lora_A.weight", a), ("x.lora_B.weight", b)], 0.5))
    torch.testing.assert_close(found["x.lora_B.weight"] @ found["x.lora_A.weight"], -0.5 * b @ a)


def test_simnpo_is_of_the_mean_over_an_answers_tokens() -> None:
    losses, counts = torch.tensor([6.0, 2.0, 2.0]), torch.tensor([3.0, 1.0, 4.0])
    found = simnpo(losses, counts, 2.0, 0.5)
    expected = [math.log1p(math.exp(-2 * (mean - 0.5))) for mean in (2.0, 2.0, 0.5)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
