"""Runs in stages: the same on any number of processes, under any strategy and after a resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.runs import ROOT, ROWS, TINY, Runs, column, difference, events
from tests.support.training import Case, Trained, train
from tests.tasks.test_pretrain import GPT

SOURCES = [
    {"source": f"{ROWS}[:60]", "name": "first"},
    {"source": f"{ROWS}[60:100]", "name": "second"},
    {"source": f"{ROWS}[100:]", "name": "third"},
]
STAGES = [
    {"until": "3 steps", "weights": {"first": 3, "second": 1}},
    {"until": "2k tokens", "weights": {"second": 1, "third": 2}},
    {"weights": {"first": 1, "second": 1, "third": 1}},
]
STAGED = (f"data.train={json.dumps(SOURCES)}", f"data.stages={json.dumps(STAGES)}", "data.limit=null")
SMALL = ("data.validation=8", "train.max_steps=10", "train.mixed_precision=no", "model.dropout=0")
SPREAD = {name: (f"parallel.strategy={name}",) for name in ("ddp", "fsdp")}


def test_losses_do_not_depend_on_processes_and_strategies(runs: Runs) -> None:
    one = train(runs, {"": Case((*STAGED, *SMALL, "parallel.strategy=single"))}, 1)[""]
    assert len(one.column("loss")) == 10
    tokens = one.column("tokens")
    assert tokens[2] < 2000 < tokens[-2]  # so that there are three stages
    for name, trained in train(runs, {name: Case((*STAGED, *SMALL, *how)) for name, how in SPREAD.items()}, 2).items():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5, name
        assert trained.column("tokens") == tokens, name


def killed_and_resumed(runs: Runs, *settings: str, step: int) -> None:
    fixed = (*STAGED, *SMALL, *settings, "train.max_steps=14", "checkpoint.every=2", "parallel.num_processes=2")
    uninterrupted = runs.trained(*fixed)
    started = runs.train(*fixed)
    started.wait_for_step(step)
    started.kill()
    assert started.wait().code == -signal.SIGKILL
    assert started.run is not None and not (started.run / "final").exists()
    copy = runs.copied(started.run)
    runs.resumed(started.run)
    for name in ("loss", "grad_norm", "tokens", "target_tokens"):
        assert column(started.run, name) == column(uninterrupted, name), name
    assert events(started.run, "start")[-1]["resumed_from"] >= step - 2
    runs.resumed(copy, "parallel.num_processes=1")
    assert [start["world_size"] for start in events(copy, "start")] == [2, 1]
    assert column(copy, "tokens") == column(uninterrupted, "tokens")
    assert difference(column(copy, "loss"), column(uninterrupted, "loss")) < 1e-5
    lines = events(copy, "start")[-1]["data"]
    assert sum(line.startswith("stage ") for line in lines) == 3


def test_killed_within_a_stage_and_resumed_on_other_processes(runs: Runs) -> None:
    killed_and_resumed(runs, step=5)


@pytest.mark.slow
def test_killed_in_the_last_stage(runs: Runs) -> None:
    killed_and_resumed(runs, "parallel.strategy=fsdp", step=11)


def test_a_run_that_is_made_longer_goes_on_with_its_last_stage(runs: Runs, tmp_path: Path) -> None:
    settings = (*STAGED, *SMALL, "parallel.strategy=single")
    cases = {
        "short": Case(settings, None, str(tmp_path / "run")),
        "longer": Case((*settings, "train.max_steps=14"), None, str(tmp_path / "run")),
        "whole": Case((*settings, "train.max_steps=14")),
    }
    trained = train(runs, cases, 1)
    tokens = trained["short"].column("tokens") + trained["longer"].column("tokens")
    assert tokens == trained["whole"].column("tokens") and len(tokens) == 14


def corpus(stages: list[dict[str, object]], *overrides: str) -> Case:
    """A pretraining on two corpora of this repository."""
    sources = [
        {"source": str(ROOT / "docs" / "tutorials"), "name": "docs", "format": "documents"},
        {"source": str(ROOT / "src" / "trainwright" / "utils"), "name": "code", "format": "documents"},
    ]
    fixed = ("task=pretrain", f"data.train={json.dumps(sources)}", f"data.stages={json.dumps(stages)}")
    more = ("data.limit=null", "data.validation=2", "data.max_length=64", f"model.config={GPT}", "train.max_steps=8")
    return Case((*fixed, *more, "model.dropout=0", "train.mixed_precision=no", *overrides))


@pytest.mark.parametrize("pack", ["null", "128"])
def test_short_sequences_come_first(runs: Runs, pack: str) -> None:
    """Windows are divided: the same tokens are trained on, and each is predicted from fewer of those before it."""
    both = {"docs": 1, "code": 1}
    short = [{"until": "4 steps", "max_length": 16, "weights": both}, {"weights": both}]
    whole = [{"until": "4 steps", "weights": both}, {"weights": both}]
    settings = (f"data.pack_length={pack}", "train.micro_batch_size=4")
    alone = (*settings, "parallel.strategy=single")
    cases = {"short": corpus(short, *alone), "whole": corpus(whole, *alone)}
    one = train(runs, cases, 1)
    assert one["short"].column("target_tokens") == one["whole"].column("target_tokens")
    assert one["short"].column("loss")[0] != one["whole"].column("loss")[0]
    two: dict[str, Trained] = train(runs, {name: corpus(short, *settings, *how) for name, how in SPREAD.items()}, 2)
    for name, trained in two.items():
        assert difference(trained.column("loss"), one["short"].column("loss")) < 1e-5, name
        assert trained.column("tokens") == one["short"].column("tokens"), name


def test_the_examples_of_every_stage_are_shown(runs: Runs) -> None:
    ended = runs.command("data", "show", str(TINY), *STAGED, *SMALL, "--count", "1").wait()
    assert ended.code == 0, ended.stderr
    for stage in (1, 2, 3):
        assert f"stage {stage}, example 1: " in ended.stdout
    assert "stage 1: steps 1 to 3, 24 examples: 18 of first, 6 of second" in ended.stdout + ended.stderr
