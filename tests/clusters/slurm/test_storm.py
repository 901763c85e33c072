"""Ten interruptions of runs on a real Slurm, as bench/storm.py does a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import storm
from tests.support.slurm import Slurm, why_not


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_interrupted_runs_finish_by_themselves_as_if_undisturbed(tmp_path: Path) -> None:
    trials = storm.drawn(seed=1, count=10)
    assert len({trial.kind for trial in trials}) == 10 and {trial.phase for trial in trials} == set(storm.PHASES)
    storm.make_references(tmp_path)
    slurm = Slurm(tmp_path / "slurm", storm.variables(tmp_path))
    try:
        lines = [storm.perform(trial, slurm, tmp_path) for trial in trials]
    finally:
        slurm.close()
    assert [(line["case"], line["why"]) for line in lines if line["verdict"] != storm.HELD] == []


def test_the_same_seed_draws_the_same_trials_and_all_kinds_come_before_any_twice() -> None:
    trials = storm.drawn(0, 100)
    assert trials[:30] == storm.drawn(0, 30) and trials != storm.drawn(1, 100)
    kinds = [trial.kind for trial in trials[: len(storm.KINDS)]]
    assert sorted(kinds) == sorted(storm.KINDS)
