"""A rank that does something else than the others is named, and nothing of what it did is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ON_ROWS, TINY, Finished, Runs, events

SETTINGS = (ON_ROWS, "train.max_steps=4", "evaluate.every=null", "parallel.num_processes=2")


def train(runs: Runs, policy: str, *overrides: str) -> tuple[Path, Finished]:
    run = runs.new_directory("run")
    named = (f"logging.run_directory={run}", "logging.observers.tensorboard=false")
    policies = f"train.step_policies=['tests.support.differing:{policy}']"
    return run, runs.command("train", str(TINY), *named, *SETTINGS, *overrides, policies).wait()


@pytest.mark.parametrize(
    ("policy", "strategy", "code", "told"),
    [
        ("SkipOnOne", "ddp", 4, "SkipOnOne skips the update of step 2 on rank 1 and not on rank 0"),
        ("SkipLastOnOne", "fsdp", 4, "SkipLastOnOne skips the update of step 4 on rank 1 and not on rank 0"),
        pytest.param("SkipOnOne", "zero2", 4, "skips the update of step 2 on rank 1", marks=pytest.mark.slow),
        ("RepeatOnOne", "ddp", 4, "computed step 2 when the other ranks computed step 3"),
        ("ChangeLastOnOne", "ddp", 5, "the weights of the ranks differ at step 4"),
    ],
)
def test_ranks_that_differ_end_the_run_before_anything_is_written(
    runs: Runs, policy: str, strategy: str, code: int, told: str
) -> None:
    run, ended = train(runs, policy, f"parallel.strategy={strategy}")
    assert ended.code == code, ended.stdout + ended.stderr
    assert told in ended.stderr
    assert not (run / "final").exists() and not list((run / "checkpoints").glob("step-*"))
    assert events(run, "restart") == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ExitOnOne", "ExitAtOnceOnOne"])
def test_a_rank_that_exits_with_0_has_failed(runs: Runs, policy: str) -> None:
    run, ended = train(runs, policy)
    assert ended.code == 4, ended.stdout + ended.stderr
    assert "rank 1 ended itself with exit code 0 before the run had ended" in ended.stderr
    assert not (run / "final").exists() and events(run, "restart") == []
