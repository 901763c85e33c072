"""Runs that end early or slow down by what evaluations and losses show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import ON_ROWS, Runs, column, events
from trainwright.engine.progress import Patience

FEW = (ON_ROWS, "data.validation=8", "train.micro_batch_size=2", "model.dropout=0", "evaluate.every=1")
DIVERGING = (*FEW, "optimizer.learning_rate=0.3", "optimizer.max_grad_norm=null", "optimizer.schedule=constant")


def losses(run: Path) -> list[float]:
    return [event["metrics"]["loss"] for event in events(run, "evaluate") if event["step"]]


def stops_at(values: list[float], patience: int, delta: float = 0.0) -> int:
    best, since = math.inf, 0
    for number, value in enumerate(values, 1):
        best, since = (value, 0) if value < best - delta else (best, since + 1)
        if since == patience:
            return number
    return len(values)


STOPPING = (*DIVERGING, "train.max_steps=12", "evaluate.early_stopping={patience: 2}")


@pytest.mark.slow
def test_a_run_ends_when_evaluations_no_longer_improve(runs: Runs) -> None:
    whole = runs.trained(*DIVERGING, "train.max_steps=12")
    expected = stops_at(losses(whole), 2)
    assert 2 < expected < 12, "the rate is so high that losses rise again"
    run = runs.trained(*STOPPING)
    assert column(run, "loss") == column(whole, "loss")[:expected]
    (finish,) = events(run, "finish")
    assert (finish["status"], finish["step"]) == ("finished", expected)
    assert (run / "final" / "model.safetensors").is_file()
    assert "loss has not improved in the last 2 evaluations" in (run / "events.jsonl").read_text()


@pytest.mark.slow
def test_it_ends_at_the_same_step_on_two_processes_and_when_resumed(runs: Runs) -> None:
    expected = len(column(runs.trained(*STOPPING), "loss"))
    two = runs.trained(*STOPPING, "parallel.num_processes=2", "parallel.strategy=ddp")
    assert len(column(two, "loss")) == expected
    stopped = runs.train(*STOPPING, "--until", f"step {expected - 1}")
    assert stopped.wait().code == 75
    assert stopped.run is not None
    assert column(runs.resumed(stopped.run), "loss") == column(runs.trained(*STOPPING), "loss")
    again = runs.resume(stopped.run).wait()  # nothing is left to do
    assert again.code == 0, again.stderr
    assert len(column(stopped.run, "loss")) == expected
    runs.resumed(stopped.run, "evaluate.early_stopping.patience=4")
    whole = column(runs.trained(*DIVERGING, "train.max_steps=12"), "loss")
    longer = column(stopped.run, "loss")
    assert len(longer) > expected
    assert longer == whole[: len(longer)]


@pytest.mark.parametrize(
    ("metric", "greater", "sign"),
    [
        ("loss", None, 1),
        ("retain_nll", None, 1),
        ("perplexity", None, 1),
        ("near/perplexity", None, 1),
        ("loss/rouge_l", None, -1),
        ("rouge_l", None, -1),
        ("x", False, 1),
        ("loss", True, -1),
    ],
)
def test_what_is_better_follows_from_the_name_of_a_metric(metric: str, greater: bool | None, sign: float) -> None:
    from trainwright.recipe.schema import EarlyStoppingSection

    assert EarlyStoppingSection(metric=metric, greater_is_better=greater).sign == sign


def test_patience_counts_values_that_are_not_lower_by_the_least() -> None:
    patience, values = Patience(), [5.0, 4.0, 3.9, 3.95, 2.0]
    assert [patience.add(value, lambda best: best - 0.2) for value in values] == [0, 0, 1, 2, 0]


PLATEAU = (*DIVERGING, "train.max_steps=8", "optimizer.schedule=reduce_on_plateau", "optimizer.plateau_patience=1")
PLATEAU += ("optimizer.plateau_factor=0.5", "optimizer.final_learning_rate_ratio=0.2")


def test_the_rate_is_reduced_as_torch_does(runs: Runs) -> None:
    run = runs.trained(*PLATEAU)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.06)
    expected = []
    for loss in losses(run):
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(loss)
    rates = column(run, "learning_rate")
    assert rates[1:] == pytest.approx(expected[1:])
    assert min(rates[1:]) < 0.3


@pytest.mark.slow
def test_a_reduced_rate_is_resumed(runs: Runs) -> None:
    stopped = runs.train(*PLATEAU, "--until", "step 5")
    assert stopped.wait().code == 75
    assert stopped.run is not None
    assert column(runs.resumed(stopped.run), "loss") == column(runs.trained(*PLATEAU), "loss")


def test_a_loss_above_the_limit_for_long_enough_ends_the_run(runs: Runs) -> None:
    whole = column(runs.trained(*DIVERGING, "train.max_steps=12"), "loss")

    def pairs(limit: float) -> list[int]:
        """The steps above a limit that follow another one."""
        return [n for n in range(2, 13) if whole[n - 2] > limit and whole[n - 1] > limit]

    # A limit that one step is above before two in a row are.
    limit = next(
        one for one in sorted(whole) if (two := pairs(one)) and any(loss > one for loss in whole[: two[0] - 2])
    )
    step = pairs(limit)[0]
    started = runs.train(*DIVERGING, "train.max_steps=12", f"train.max_loss={limit}", "train.max_loss_steps=2")
    ended = started.wait()
    assert ended.code == 4
    assert f"at step {step} is above train.max_loss" in ended.stderr
    assert started.run is not None
    assert column(started.run, "loss") == whole[: step - 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluate.early_stopping={patience: 2}",), "evaluate.early_stopping: needs evaluations while training"),
        (("optimizer.schedule=reduce_on_plateau",), "optimizer.schedule: needs evaluations while training"),
        (("optimizer.plateau_factor=0.5",), "optimizer.plateau_factor: has no effect with schedule cosine"),
        (("train.max_loss_steps=5",), "train.max_loss_steps: has no effect without train.max_loss"),
        (("sft.eaft_top=5",), "sft.eaft_top: has an effect with loss eaft only"),
        (("sft={loss: dft, label_smoothing: 0.1}",), "sft.label_smoothing: has no effect with loss dft"),
    ],
)
def test_what_has_no_effect_is_refused(runs: Runs, words: tuple[Any, ...], message: str) -> None:
    ended = runs.train(*words).wait()
    assert ended.code == 2
    assert message in ended.stderr


def test_a_metric_that_evaluations_do_not_have_ends_the_run_at_once(runs: Runs) -> None:
    ended = runs.train(*FEW, "evaluate.early_stopping={metric: rouge_l}").wait()
    assert ended.code == 4
    assert "evaluations have no rouge_l; they have loss, perplexity, token_accuracy" in ended.stderr
