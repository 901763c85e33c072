"""When a run saves its state by itself."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import pytest
from scipy.optimize import minimize_scalar

from tests.support.commands import wait_for
from tests.support.runs import ON_ROWS, Runs, column, events
from tests.support.training import ALONE, trainer_of
from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.checkpoints.checkpointing import Checkpointing
from trainwright.engine.checkpoints.saving import Saving, compute_best_interval
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.fields import parse_seconds

RECIPE = "task: sft\nmodel: {config: {model_type: llama}, tokenizer: bytes}\ndata: {train: rows.jsonl}\n"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved_at(every: int | str | None, step_seconds: float, steps: int, cost: float) -> list[float]:
    """Seconds from the beginning at which a run with steps and checkpoints this long saves."""
    clock = Clock()
    saving, found = Saving(every, clock=clock), []
    for step in range(1, steps + 1):
        clock.now += step_seconds
        if saving.is_due(step):
            found.append(clock.now - 1000)
            clock.now += cost
            saving.started()
            saving.record_seconds(cost)
    return found


def test_by_itself_a_run_saves_early_and_then_every_ten_minutes() -> None:
    assert saved_at("auto", 1.0, 2400, 0.0) == [120, 720, 1320, 1920]
    assert saved_at("auto", 1.0, 119, 0.0) == []


@pytest.mark.parametrize("cost", [0.1, 5.0, 30.0, 600.0])
@pytest.mark.parametrize("step", [0.01, 7.0, 900.0])
def test_saving_takes_a_small_part_of_the_time(cost: float, step: float) -> None:
    steps = int(2_000_000 / step) if step > 1 else 300_000
    saves = saved_at("auto", step, steps, cost)
    total = steps * step + len(saves) * cost
    assert saves and (len(saves) - 1) * cost <= 0.02 * total
    assert all(later - earlier <= max(600, cost * 50) + cost + step for earlier, later in itertools.pairwise(saves))


@pytest.mark.parametrize(
    ("between", "written"), [(None, 800.0), ("6 h", 800.0), ("6 h", 60.0), ("1 h", 140.0), ("1 min", 20.0)]
)
def test_training_does_not_wait_for_a_checkpoint_that_takes_longer_than_the_interval(
    between: str | None, written: float
) -> None:
    clock, blocks, blocked, complete = Clock(), 2.0, 0.0, None
    saving = Saving("auto", between, clock)
    saves = []
    for step in range(1, 50_000):
        clock.now += 1.0
        if complete is not None and clock.now >= complete:
            saving.record_seconds(blocks)
            complete = None
        if saving.is_due(step, writing=complete is not None):
            if complete is not None:  # at most one is written at a time
                blocked += complete - clock.now
                clock.now = complete
                saving.record_seconds(blocks)
            saves.append(clock.now)
            saving.started()
            clock.now += blocks
            blocked += blocks
            complete = clock.now + written
    total = 50_000 + blocked
    assert len(saves) > 10
    assert blocked == blocks * len(saves), "it waits for no disk"
    usual = 600.0 if between is None else compute_best_interval(blocks, parse_seconds(between))
    gaps = [later - earlier for earlier, later in itertools.pairwise(saves)]
    assert all(gap <= max(usual, written + blocks) + 3 for gap in gaps)
    assert between == "1 min" or blocked <= 0.02 * total


def test_a_checkpoint_that_is_never_complete_does_not_keep_the_next_from_being_due() -> None:
    clock = Clock()
    saving = Saving("auto", clock=clock)
    saving.started()
    clock.now += 1000
    assert not saving.is_due(1, writing=True) and saving.is_due(1)
    clock.now += 86_400
    assert saving.is_due(2, writing=True)


def test_by_itself_a_run_does_not_save_while_a_checkpoint_is_being_written(tmp_path: Path) -> None:
    settings = ["checkpoint.every=auto", "checkpoint.background=true", "faults.mean_time_between=1 s"]
    training = trainer_of(ALONE, settings, tmp_path)[0].training
    checkpointing = Checkpointing(training, Checkpoints(tmp_path, keep_last=1, keep_best=False), ())
    training.progress.step = 1
    wait_for(lambda: checkpointing.is_due(1))
    checkpointing.save(required=False)
    time.sleep(0.2)  # twice the interval
    assert checkpointing.started_step == 1 and not checkpointing.is_due(2)
    checkpointing.close()
    assert checkpointing.step == 1
    wait_for(lambda: checkpointing.is_due(3))


def lost(interval: float, cost: float, between: float) -> float:
    """The expected time of a run over the time of its steps, with failures at random (Daly 2006, equation 20)."""
    return between * (math.exp((interval + cost) / between) - 1) / interval


@pytest.mark.parametrize("cost", [0.05, 2.0, 30.0, 200.0])
@pytest.mark.parametrize("between", [600.0, 6 * 3600.0, 7 * 24 * 3600.0])
def test_the_interval_for_failures_at_random_loses_the_least_time(cost: float, between: float) -> None:
    best = minimize_scalar(lost, args=(cost, between), bounds=(1e-3, 10 * between), method="bounded")
    assert lost(compute_best_interval(cost, between), cost, between) - 1 <= 1.02 * (best.fun - 1)


def test_a_run_that_fails_often_saves_often() -> None:
    clock = Clock()
    saving = Saving("auto", "1 min", clock)
    clock.now += 5.5
    assert not saving.is_due(1)
    clock.now += 0.5
    assert saving.is_due(1), "before the cost is known, and long before the next failure"
    saving.started()
    saving.record_seconds(0.3)
    clock.now += 5.5
    assert not saving.is_due(2)
    clock.now += 0.5
    assert saving.is_due(3)


@pytest.mark.parametrize("waits", [0.1, 600.0])
def test_one_that_cannot_be_written_is_tried_again_soon_and_then_later_each_time(waits: float) -> None:
    clock = Clock()
    saving = Saving("auto", clock=clock)
    for cost in (1.0, 1.0):
        saving.started()
        saving.record_seconds(cost)

    def next_due() -> float:
        since = clock.now
        while not saving.is_due(1):
            clock.now += 1.0
        return clock.now - since

    assert next_due() == 600
    found = []
    for _ in range(10):
        saving.started()
        clock.now += waits
        saving.failed(waits)
        found.append(next_due())
    assert found[:3] == [120, 240, 480]
    assert found[-1] == max(600, waits / 0.02)
    saving.started()
    saving.record_seconds(1.0)
    assert next_due() == 600, "what failing costs is not what writing costs"


@pytest.mark.parametrize("between", [None, "6 h"])
def test_one_slow_checkpoint_does_not_delay_the_next(between: str | None) -> None:
    clock = Clock()
    saving = Saving("auto", between, clock)
    usual = 600.0 if between is None else compute_best_interval(1.0, 6 * 3600)
    for cost in (1.0, 1.0, 600.0, 1.0, 1.0):
        saving.started()
        saving.record_seconds(cost)
        clock.now += usual - 1
        assert not saving.is_due(1)
        clock.now += 2
        assert saving.is_due(1)
    for cost in (60.0, 60.0):  # a disk that stays slow does
        saving.started()
        saving.record_seconds(cost)
    clock.now += usual + 1
    assert not saving.is_due(1)


def test_steps_times_and_never() -> None:
    assert saved_at(3, 1.0, 10, 5.0) == [3, 11, 19]
    assert saved_at("4 s", 1.0, 12, 0.0) == [4, 8, 12]
    assert saved_at(None, 1e6, 10, 0.0) == []


@pytest.mark.parametrize(("time", "seconds"), [("600 s", 600), ("10 min", 600), ("1.5h", 5400), ("2 hours", 7200)])
def test_times_are_read_as_people_write_them(tmp_path: Path, time: str, seconds: float) -> None:
    assert parse_seconds(time) == seconds
    (tmp_path / "recipe.yaml").write_text(f"{RECIPE}checkpoint: {{every: {time}}}\n")
    assert load_recipe(tmp_path / "recipe.yaml").checkpoint.every == time


@pytest.mark.parametrize("every", ["0", "-3", "2.5", "true", "'5'", "10 parsecs", "0 s", "often", "'٣ s'", "[5]"])
def test_what_is_no_interval_is_refused_with_what_is(tmp_path: Path, every: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{RECIPE}checkpoint: {{every: {every}}}\n")
    with pytest.raises(RequestError, match=r"checkpoint\.every.*a whole number of steps, a time such as 10 min"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.slow
def test_saving_by_time_changes_no_loss(runs: Runs) -> None:
    fixed = ("parallel.num_processes=2", ON_ROWS, "train.max_steps=12")
    never = runs.trained(*fixed, "checkpoint.every=null")
    often = runs.trained(*fixed, "checkpoint.every=0.001 s")
    assert [event["step"] for event in events(never, "checkpoint")] == [12]
    assert [event["step"] for event in events(often, "checkpoint")] == list(range(1, 13))
    for name in ("loss", "grad_norm", "tokens"):
        assert column(often, name) == column(never, name)
