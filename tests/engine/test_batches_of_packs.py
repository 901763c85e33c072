"""Batches counted in packs: the same steps on any number of processes, resumed, and as planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ON_ROWS, TINY, Runs, column, difference, events
from tests.support.training import Case, train
from trainwright.machine.detect import detect
from trainwright.planning.facts import build_facts
from trainwright.recipe.loading import load_recipe
from trainwright.run.resolve import resolve

PACKS = ("train.batch_unit=packs", "train.global_batch_size=4", "train.micro_batch_size=1", "data.pack_length=256")
SMALL = (*PACKS, "data.validation=8", "train.max_steps=4", "train.mixed_precision=no", "model.dropout=0")


def test_losses_do_not_depend_on_processes_and_micro_batches(runs: Runs) -> None:
    one = train(runs, {"one": Case((*SMALL, "parallel.strategy=single"))}, 1)["one"]
    assert len(one.column("loss")) == 4
    cases = {s: Case((*SMALL, f"parallel.strategy={s}")) for s in ("ddp", "fsdp")}
    cases["rows"] = Case((*SMALL, "parallel.strategy=ddp", "train.micro_batch_size=2"))
    for name, trained in train(runs, cases, 2).items():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5, name
        assert trained.column("tokens") == one.column("tokens"), name


def test_a_resumed_run_has_the_same_batches(runs: Runs, tmp_path: Path) -> None:
    settings = (*SMALL, "parallel.strategy=single")
    cases = {part: Case(settings, part, str(tmp_path)) for part in (2, None)}
    found = train(runs, {**cases, "whole": Case(settings)}, 1)
    assert found[2].column("loss") + found[None].column("loss") == found["whole"].column("loss")


@pytest.mark.slow
def test_the_tokens_of_a_step_are_planned(runs: Runs) -> None:
    settings = (ON_ROWS, *PACKS, "train.epochs=2", "train.max_steps=null", "data.validation=8", "model.dropout=0")
    run = runs.trained(*settings)
    (start,) = events(run, "start")
    assert (start["global_batch_size"], start["batch_unit"]) == (4, "packs")
    tokens = column(run, "tokens")
    planned = build_facts(resolve(load_recipe(TINY, list(settings)), detect()).recipe).workload
    mean = tokens[-2] / (len(tokens) - 1)  # the last step may be smaller
    assert 0.8 * 4 * 256 < mean <= 4 * 256
    assert planned.batch_tokens == pytest.approx(mean, rel=0.15)
    assert planned.global_batch_rows == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.batch_unit=packs", "data.pack_length=null"), "train.batch_unit: there are no packs"),
        ((*PACKS, "train.initial_batch_size=2", "train.batch_warmup_steps=2"), "train.batch_unit: growing batches"),
    ],
)
def test_what_cannot_be_counted_in_packs_is_refused(runs: Runs, words: tuple[str, ...], message: str) -> None:
    ended = runs.train(*words).wait()
    assert ended.code == 2
    assert message in ended.stderr
