"""A flipped bit on one rank is found, its rank is named, and the run goes on as if there had been none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import ON_ROWS, TINY, Finished, Runs, difference, events
from trainwright.engine.policies.replay import Passes, _find_mismatches, _find_odd_ones
from trainwright.faults.drills.planted import flip_bit
from trainwright.models.files import compute_checksum

SETTINGS = (ON_ROWS, "train.max_steps=12", "checkpoint.every=2", "evaluate.every=null", "faults.replay_every=3")


def settings(count: int, strategy: str) -> tuple[str, ...]:
    return (*SETTINGS, f"parallel.num_processes={count}", f"parallel.strategy={strategy}")


def flipped(runs: Runs, policy: str, where: dict[str, Any], *overrides: str) -> tuple[Path, Finished]:
    run = runs.new_directory("run")
    named = (f"logging.run_directory={run}", "logging.observers.tensorboard=false")
    policies = f"train.step_policies=['{policy if ':' in policy else f'trainwright.faults.drills.planted:{policy}'}']"
    place = {"place": 0.37, "bit": 3, "pass": 0, **where}
    started = runs.command("train", str(TINY), *named, *overrides, policies, TRAINWRIGHT_FAULT=json.dumps(place))
    return run, started.wait()


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(run, "step")}


def test_any_flipped_bit_changes_a_checksum() -> None:
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 16)):
        whole = torch.randn(7, 5).to(dtype)
        for bit in range(bits - 1):
            other = whole.clone()
            flip_bit(other, 0.5, bit)
            assert compute_checksum(other) != compute_checksum(whole)
            assert compute_checksum(other.t()) == compute_checksum(other)


def test_the_odd_one_out_is_known_from_three_on() -> None:
    assert _find_odd_ones([5, 5, 4]) == [2]
    assert _find_odd_ones([5, 4]) == [] and _find_odd_ones([1, 2, 3]) == []
    # What a rank computes of its own, and of the next rank's.
    right = [Passes([1], [2]), Passes([2], [3]), Passes([3], [1])]
    assert _find_mismatches(right) == []
    assert _find_mismatches([right[0], Passes([9], [3]), right[2]]) == [1]
    assert _find_mismatches([right[0], Passes([2], [9]), right[2]]) == [2]


@pytest.mark.slow
def test_a_run_that_checks_is_the_run_that_does_not(runs: Runs) -> None:
    never = losses(runs.trained(*settings(2, "ddp"), "faults.replay_every=null"))
    checked = runs.trained(*settings(2, "ddp"))
    assert losses(checked) == never and events(checked, "fault") == []


@pytest.mark.parametrize(
    ("count", "strategy", "rank"),
    [(2, "ddp", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "ddp", 0), (3, "ddp", 2)))],
)
def test_a_wrong_weight_is_found_and_taken_back(runs: Runs, count: int, strategy: str, rank: int) -> None:
    overrides = settings(count, strategy)
    undisturbed = losses(runs.trained(*overrides))
    run, ended = flipped(runs, "FlippedWeight", {"rank": rank, "step": 7}, *overrides)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert losses(run) == undisturbed
    first, second = events(run, "fault")  # found before the checkpoint of step 8; the check at 6 passed
    assert first["kind"] == second["kind"] == "corrupted_weights"
    assert first["action"].endswith("step-00000004") and events(run, "rewind")[0]["left_out"] == []
    assert f"the weights of rank {rank} were wrong at step 8" in second["detail"] and second["rank"] == rank
    assert (first["rank"] == rank) or count == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "strategy", "rank", "passed"),
    [
        (2, "fsdp", 1, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, "single", 0, 1),
                (2, "ddp", 0, 0),
                (2, "ddp", 1, 1),
                (2, "zero2", 1, 1),
                (2, "zero3", 0, 0),
            )
        ),
    ],
)
def test_a_wrong_pass_is_found_and_its_rank_is_named(
    runs: Runs, count: int, strategy: str, rank: int, passed: int
) -> None:
    overrides = settings(count, strategy)
    undisturbed = losses(runs.trained(*overrides))
    run, ended = flipped(runs, "Activation", {"rank": rank, "step": 9, "pass": passed}, *overrides)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert losses(run) == undisturbed
    (fault,) = events(run, "fault")
    assert fault["kind"] == "corrupted_computation" and fault["rank"] == rank
    assert f"rank {rank} computed step 9 wrongly" in fault["detail"]


@pytest.mark.slow
def test_a_weight_that_is_wrong_only_where_it_is_computed_with_is_found(runs: Runs) -> None:
    overrides = (*settings(2, "ddp"), "train.mixed_precision=bf16")
    undisturbed = losses(runs.trained(*overrides))
    where = {"rank": 1, "step": 8, "bit": 6}
    run, ended = flipped(runs, "tests.support.flipping:ComputingWeight", where, *overrides)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert losses(run) == undisturbed
    first, second = events(run, "fault")
    assert first["kind"] == second["kind"] == "corrupted_weights"
    assert "the weights of rank 1 were wrong at step 8" in second["detail"]


@pytest.mark.slow
def test_without_a_check_that_has_passed_a_run_goes_back_to_what_it_was_resumed_from(runs: Runs) -> None:
    overrides = settings(2, "ddp")
    undisturbed = losses(runs.trained(*overrides))
    policy = "train.step_policies=['trainwright.faults.drills.planted:FlippedWeight']"
    started = runs.train(*overrides, policy, "faults.replay_every=null", "--until", "step 6")
    assert started.wait().code == 75
    run = started.run
    assert run is not None
    fault = json.dumps({"rank": 1, "step": 7, "place": 0.37, "bit": 3, "pass": 0})
    ended = runs.command("train", "--resume", str(run), "faults.replay_every=4", TRAINWRIGHT_FAULT=fault).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    assert losses(run) == undisturbed
    assert events(run, "fault")[0]["action"].endswith("step-00000006")


@pytest.mark.slow
def test_a_new_run_whose_first_check_fails_begins_again_when_it_is_resumed(runs: Runs) -> None:
    overrides = settings(2, "ddp")
    undisturbed = losses(runs.trained(*overrides))
    run, ended = flipped(runs, "FlippedWeight", {"rank": 1, "step": 1}, *overrides)
    assert ended.code == 5 and "--resume, which begins at the first step" in ended.stderr
    assert not list((run / "checkpoints").glob("step-*"))
    assert losses(runs.resumed(run)) == undisturbed


@pytest.mark.slow
def test_a_run_may_end_instead(runs: Runs) -> None:
    overrides = (*settings(2, "ddp"), "faults.on_corruption=stop")
    run, ended = flipped(runs, "FlippedWeight", {"rank": 1, "step": 1}, *overrides)
    assert ended.code == 5 and "the weights of the ranks differ at step 2" in ended.stderr
    (fault,) = events(run, "fault")
    assert fault["action"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("place", [0.02, 0.52])
def test_a_wrong_frozen_weight_ends_the_run(runs: Runs, place: float) -> None:
    overrides = (*settings(2, "ddp"), "model.adapter={type: lora, rank: 4}")
    run, ended = flipped(runs, "FrozenWeight", {"rank": 1, "step": 4, "place": place, "bit": 22}, *overrides)
    assert ended.code == 5, ended.stdout + ended.stderr
    assert "the frozen weights of the ranks differ at step 4: ranks 0, 1" in ended.stderr
    (fault,) = events(run, "fault")
    assert fault["kind"] == "corrupted_weights" and fault["action"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_checks_change_nothing_under_any_strategy(runs: Runs, strategy: str) -> None:
    never = losses(runs.trained(*settings(2, strategy), "faults.replay_every=null"))
    assert difference(list(losses(runs.trained(*settings(2, strategy))).values()), list(never.values())) == 0
