"""A run that starts from a checkpoint of another run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.runs import ON_ROWS, Runs, difference, events
from tests.support.slow import slow_but
from trainwright.observe.reports.figures import RunFigures
from trainwright.observe.reports.page import build_report
from trainwright.observe.watching.app import Board

BASE = (ON_ROWS, "data.validation=8", "train.max_steps=8", "checkpoint.every=4", "checkpoint.keep_last=5")
BASE = (*BASE, "model.dropout=0", "train.mixed_precision=no", "train.micro_batch_size=2", "optimizer.warmup_steps=0")


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def forked(runs: Runs, reference: str, *overrides: str) -> Path:
    started = runs.train(*BASE, f"train.fork={reference}", *overrides)
    ended = started.wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert started.run is not None
    return started.run


def refusal(runs: Runs, reference: str, *overrides: str) -> str:
    started = runs.train(*BASE, f"train.fork={reference}", *overrides)
    ended = started.wait()
    assert ended.code == 2, ended.stdout + ended.stderr
    assert started.run is not None and not started.run.exists()
    return ended.stderr.replace("\n", " ")


@pytest.mark.parametrize("strategy", slow_but("single", "fsdp", among=["single", "ddp", "fsdp", "zero2"]))
def test_a_fork_without_a_change_goes_on_as_its_parent(runs: Runs, strategy: str) -> None:
    parent = runs.trained(*BASE)
    count = 1 if strategy == "single" else 2
    run = forked(runs, f"{parent}@4", f"parallel.strategy={strategy}", f"parallel.num_processes={count}")
    before, after = losses(parent), losses(run)
    assert list(after) == [5, 6, 7, 8]
    if strategy == "single":
        assert after == {step: before[step] for step in after}
    assert difference(list(after.values()), [before[step] for step in after]) < 1e-5
    (start,) = events(run, "start")
    manifest = json.loads((parent / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert start["parent"] == {"run": str(parent), "step": 4, "sha256": manifest["sha256"], "optimizer_state": True}
    assert [event["step"] for event in events(run, "evaluate")] == [4, 8]


@pytest.mark.parametrize(
    "overrides",
    slow_but(
        ("model.adapter={type: lora, rank: 4}",),
        among=[
            ("model.adapter={type: lora, rank: 4}",),
            ("model.adapter={type: oft}",),
            ("task=dpo", "data.train=pydoc-pairs", "data.limit=64"),
            ("task=dpo", "data.train=pydoc-pairs", "data.limit=64", "model.adapter={type: lora, rank: 4}"),
        ],
    ),
    ids=str,
)
def test_forks_of_adapters_and_of_pairs_go_on_too(runs: Runs, overrides: tuple[str, ...]) -> None:
    """The reference of a DPO run is the model that its parent started from."""
    overrides = (*overrides, "parallel.num_processes=1")
    parent = runs.trained(*BASE, *overrides)
    before, after = losses(parent), losses(forked(runs, f"{parent}@4", *overrides))
    assert after == {step: before[step] for step in (5, 6, 7, 8)}


@pytest.mark.slow
def test_what_changes_the_batches_begins_at_step_0(runs: Runs) -> None:
    parent = runs.trained(*BASE)
    run = forked(runs, str(parent), "train.seed=7", "train.max_steps=2", "optimizer.name=lion")
    assert list(losses(run)) == [1, 2]
    (start,) = events(run, "start")
    assert (start["resumed_from"], start["parent"]["step"], start["parent"]["optimizer_state"]) == (None, 8, False)
    untrained = events(runs.trained(*BASE, "train.seed=7", "train.max_steps=2", "optimizer.name=lion"), "evaluate")[0]
    assert events(run, "evaluate")[0]["metrics"]["loss"] < untrained["metrics"]["loss"]


def test_a_state_that_is_not_taken_is_that_of_a_new_run(runs: Runs) -> None:
    """An average begins with the weights that the run starts from."""
    parent = runs.trained(*BASE)
    run = forked(runs, f"{parent}@4", "optimizer.ema_decay=0.9999")
    (start,) = events(run, "start")
    assert start["parent"]["optimizer_state"] is False
    first, last = (event["metrics"]["loss"] for event in events(run, "evaluate"))
    assert abs(last - first) < 0.02 * first


def test_a_killed_fork_is_resumed_to_the_same_losses(runs: Runs) -> None:
    parent = runs.trained(*BASE)
    settings = (f"train.fork={parent}@4", "optimizer.learning_rate=3e-4", "train.max_steps=12")
    whole = forked(runs, f"{parent}@4", *settings[1:])
    for step in (5, 9):  # before its first checkpoint, and after it
        started = runs.train(*BASE, *settings)
        started.wait_for_step(step)
        started.kill()
        started.wait()
        assert started.run is not None
        runs.resumed(started.run)
        assert losses(started.run) == losses(whole)
        assert [event["parent"]["step"] for event in events(started.run, "start")] == [4] * len(
            events(started.run, "start")
        )


@pytest.mark.slow
def test_the_parent_is_shown(runs: Runs) -> None:
    parent = runs.trained(*BASE)
    run = forked(runs, f"{parent}@4")
    words = f"starts from step 4 of {parent} (sha256 "
    assert words in str(tw.compare(parent, run))
    assert words in build_report(RunFigures.read(run))
    board = Board(run.parent)
    while not board.look():
        pass
    assert words in board.rows()[run.name]["note"]


def test_the_command_has_an_option(runs: Runs) -> None:
    parent = runs.trained(*BASE)
    directory = runs.new_directory("run")
    words = (f"logging.run_directory={directory}", "train.max_steps=6")
    ended = runs.command("train", "--fork", f"{parent}@4", *words).wait()
    assert ended.code == 0, ended.stderr
    assert list(losses(directory)) == [5, 6]


@pytest.mark.slow
def test_what_cannot_be_forked_is_refused(runs: Runs, tmp_path: Path) -> None:
    parent = runs.trained(*BASE)
    assert "train.fork" in (words := refusal(runs, str(tmp_path / "none"))) and "is not a run" in words
    assert "has no checkpoint of step 5; it has those of steps 4, 8" in refusal(runs, f"{parent}@5")
    assert "this run ends after step 8 of the same batches" in refusal(runs, str(parent))
    words = refusal(runs, f"{parent}@4", "model.config.hidden_size=32")
    assert "has shape" in words and "but the model needs" in words
    copy = runs.copied(parent)
    file = next((copy / "checkpoints" / "step-00000004").glob("rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "is damaged" in refusal(runs, f"{copy}@4")
