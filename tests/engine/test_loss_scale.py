"""The scale of fp16 losses: doubled after 2,000 steps without an overflow, halved by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training import ALONE, trainer_of
from trainwright.engine.checkpoints.checkpoint import Checkpoint
from trainwright.engine.trainer import TrainingProgress

FEW = ("parallel.strategy=single", "data.limit=40", "data.validation=4", "train.max_steps=6", "checkpoint.every=1")
FP16 = "train.mixed_precision=fp16"


def progress_of(directory: Path) -> TrainingProgress:
    return TrainingProgress.of(dict(Checkpoint.open(directory).state["progress"]))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "no"])
def test_it_doubles_once_after_2000_steps_and_a_resumed_run_goes_on_counting(tmp_path: Path, precision: str) -> None:
    settings = (*FEW, f"train.mixed_precision={precision}")
    trainer, _ = trainer_of(ALONE, settings, tmp_path, until=2)
    first = trainer.progress.loss_scale
    assert first == (2.0**16 if precision == "fp16" else 1.0)
    trainer.progress.steps_at_scale = 1996  # as after so many steps without an overflow
    assert not trainer.run(tmp_path / "final")
    stopped = progress_of(tmp_path / "step-00000002")
    assert (stopped.loss_scale, stopped.steps_at_scale) == (first, 1998)
    resumed, _ = trainer_of(ALONE, settings, tmp_path)
    resumed.resume(Checkpoint.open(tmp_path / "step-00000002"))
    assert resumed.run(tmp_path / "final")
    last = progress_of(tmp_path / "step-00000006")
    assert (last.loss_scale, last.steps_at_scale) == ((2 * first, 2) if precision == "fp16" else (first, 2002))


def test_an_overflow_halves_it_and_the_count_begins_anew(tmp_path: Path) -> None:
    # Weights so large that gradients times the first loss scale are more than fp16 can hold.
    settings = (*FEW, FP16, "model.config.initializer_range=0.4")
    trainer, events = trainer_of(ALONE, settings, tmp_path)
    trainer.progress.steps_at_scale = 1994  # it would double in step 6
    assert trainer.run(tmp_path / "final")
    overflows = [event["step"] for event in events if event["event"] == "fault"]
    assert overflows and {event["kind"] for event in events if event["event"] == "fault"} == {"overflow"}
    last = progress_of(tmp_path / "step-00000006")
    # The step of the last overflow is done again, and is the first at the new scale.
    assert last.loss_scale == 2.0 ** (16 - len(overflows))
    assert last.steps_at_scale == 6 - overflows[-1] + 1


@pytest.mark.parametrize("saved", [{"strange": 1}, {"noise": {"strange": 1}}, {"step": -1}, {"tokens": "many"}])
def test_progress_that_this_version_does_not_understand_is_invalid(saved: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"strange|step|tokens"):
        TrainingProgress.of(saved)
