"""Batches counted in tokens: the same steps on any number of processes, resumed, and as planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ON_ROWS, TINY, Runs, column, difference, events
from tests.support.training import Case, train
from trainwright.machine.detect import detect
from trainwright.planning.facts import build_facts
from trainwright.recipe.loading import load_recipe
from trainwright.run.resolve import resolve

TOKENS = ("train.batch_unit=tokens", "train.global_batch_size=1200", "train.micro_batch_size=1", "data.max_length=256")
SMALL = (*TOKENS, "data.validation=8", "train.max_steps=4", "train.mixed_precision=no", "model.dropout=0")


def test_losses_do_not_depend_on_processes_and_micro_batches(runs: Runs) -> None:
    one = train(runs, {"one": Case((*SMALL, "parallel.strategy=single"))}, 1)["one"]
    assert len(one.column("loss")) == 4
    cases = {s: Case((*SMALL, f"parallel.strategy={s}")) for s in ("ddp", "fsdp")}
    cases["rows"] = Case((*SMALL, "parallel.strategy=ddp", "train.micro_batch_size=3"))
    cases["packs"] = Case((*SMALL, "parallel.strategy=ddp", "data.pack_length=256"))
    for name, trained in train(runs, cases, 2).items():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5, name
        assert trained.column("tokens") == one.column("tokens"), name


def test_a_resumed_run_has_the_same_batches(runs: Runs, tmp_path: Path) -> None:
    settings = (*SMALL, "parallel.strategy=single")
    cases = {part: Case(settings, part, str(tmp_path)) for part in (2, None)}
    trained = train(runs, {**cases, "whole": Case(settings)}, 1)
    assert trained[2].column("loss") + trained[None].column("loss") == trained["whole"].column("loss")


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["null", "256"])
def test_the_examples_of_a_step_are_planned(runs: Runs, pack: str) -> None:
    lengths = ("train.epochs=2", "train.max_steps=null", "data.validation=8", "model.dropout=0")
    settings = (ON_ROWS, *TOKENS, *lengths, f"data.pack_length={pack}", "train.micro_batch_size=auto")
    run = runs.trained(*settings)
    (start,) = events(run, "start")
    assert (start["global_batch_size"], start["batch_unit"]) == (1200, "tokens")
    tokens = column(run, "tokens")
    steps = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert max(steps) <= 1200 and all(1200 - step < 256 for step in steps[:-1])
    workload = build_facts(resolve(load_recipe(TINY, list(settings)), detect()).recipe).workload
    mean = tokens[-2] / (len(tokens) - 1)  # the last step may be smaller
    assert workload.batch_tokens == pytest.approx(mean, rel=0.15)
    assert workload.most_batch_tokens == 1200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train.global_batch_size=100",),
            "train.global_batch_size: 100 tokens are fewer than an example may have (256)",
        ),
        (
            ("train.gradient_accumulation_steps=2", "train.micro_batch_size=auto"),
            "the number of rows of a batch of tokens",
        ),
        (("train.initial_batch_size=2", "train.batch_warmup_steps=2"), "train.batch_unit: growing batches"),
    ],
)
def test_what_cannot_be_counted_in_tokens_is_refused(runs: Runs, words: tuple[str, ...], message: str) -> None:
    ended = runs.train(*TOKENS, *words).wait()
    assert ended.code == 2
    assert message in ended.stderr
