"""Which checkpoints of a run are kept and used when some cannot be written or read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import wait_for
from tests.support.training import ALONE, trainer_of
from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.checkpoints.checkpointing import Checkpointing, NothingSaved
from trainwright.engine.events import Record
from trainwright.errors import FaultError, MachineError, RequestError, TrainwrightError
from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import Heartbeat, read

Made = Callable[..., tuple[Checkpointing, list[Record]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The checkpointing of `tiny`, which keeps the last and the best, and the list that its events go to."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "checkpoints"

    def made(*overrides: str, steps: int = 0) -> tuple[Checkpointing, list[Record]]:
        trainer, seen = trainer_of(ALONE, ["checkpoint.every=1000", *overrides], tmp_path / "run")
        for _ in range(steps):
            trainer._step()
        return Checkpointing(trainer.training, Checkpoints(directory, keep_last=1, keep_best=True), ()), seen

    return made


def save(checkpointing: Checkpointing, step: int, best: float | None = None) -> None:
    """Save a step; ``best``: its validation loss, lower than those before."""
    progress = checkpointing._training.progress
    progress.step = step
    if best is not None:
        progress.best_loss, progress.best_step = best, step
    checkpointing.save(required=False)


def steps(directory: Path) -> list[int]:
    return Checkpoints(directory / "checkpoints", keep_last=1, keep_best=True).steps()


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_best_checkpoint_is_kept_until_a_better_one_is_complete(
    make: Made, tmp_path: Path, background: str
) -> None:
    checkpointing, _ = make(f"checkpoint.background={background}")
    progress = checkpointing._training.progress
    save(checkpointing, 10, best=3.0)
    save(checkpointing, 20)
    checkpointing._flush()
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("")  # as if the disk were full
    save(checkpointing, 30, best=2.0)
    checkpointing._flush()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "away").rename(tmp_path / "checkpoints")
    assert (progress.best_loss, progress.best_step) == (3.0, 10)
    for step in (40, 50):
        save(checkpointing, step)
    checkpointing._flush()
    assert steps(tmp_path) == [10, 50]
    save(checkpointing, 60, best=2.5)
    save(checkpointing, 70)
    checkpointing.close()
    assert steps(tmp_path) == [60, 70]


def test_the_best_is_kept_while_a_better_one_is_written_after_a_resume(make: Made, tmp_path: Path) -> None:
    before, _ = make(steps=1)
    save(before, 10, best=3.0)
    save(before, 20)
    checkpointing, _ = make("checkpoint.background=true")
    found = checkpointing.newest()
    assert found is not None
    checkpointing.resume(found)
    save(checkpointing, 30)
    save(checkpointing, 40, best=2.0)  # completes 30, and removes what is older
    assert checkpointing.step == 30 and {10, 30} <= set(steps(tmp_path))
    checkpointing.close()
    assert steps(tmp_path) == [40]


def test_a_run_whose_checkpoints_fail_goes_back_before_it_ends(make: Made, tmp_path: Path) -> None:
    """The weights that a rewind gives up may be wrong, and must not be saved in place of a checkpoint."""
    checkpointing, seen = make("checkpoint.background=true", "train.max_steps=100")
    save(checkpointing, 1)
    assert checkpointing.complete() == 1
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("")  # as if the disk were full
    for step in (2, 3):
        save(checkpointing, step)
        checkpointing.complete()
    save(checkpointing, 4)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "away").rename(tmp_path / "checkpoints")
    found = checkpointing.newest(before=4, phase="rewinding")
    assert found is not None and found.step == 1
    assert [record["action"] for record in seen if record["event"] == "fault"] == ["continue"] * 3
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    (tmp_path / "checkpoints").write_text("")
    save(checkpointing, 2)
    with pytest.raises(NothingSaved, match="4 checkpoints in a row could not be written"):
        checkpointing.complete()


def unreadable(monkeypatch: pytest.MonkeyPatch, number: int, *named: str) -> None:
    """Have the system fail to open files whose paths have any of these names in them."""
    original = os.open

    def failing(path: Any, *more: Any, **options: Any) -> int:
        directory = os.readlink(f"/proc/self/fd/{options['dir_fd']}") if "dir_fd" in options else ""
        if any(name in os.path.join(directory, path) for name in named):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *more, **options)

    monkeypatch.setattr(os, "open", failing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.EIO, FaultError, "check the disk"),
        (errno.ETIMEDOUT, FaultError, "check the disk"),
        (errno.EACCES, MachineError, "let this user read them"),
    ],
)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors", "state.json"])
def test_checkpoints_that_the_machine_cannot_read_are_not_said_to_be_damaged(
    make: Made, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TrainwrightError], advice: str, file: str
) -> None:
    checkpointing, _ = make()
    save(checkpointing, 10, best=3.0)
    save(checkpointing, 20)
    unreadable(monkeypatch, number, file)
    with pytest.raises(kind) as raised:
        checkpointing.newest()
    assert advice in str(raised.value) and f"step-00000020/{file}" in str(raised.value)
    assert "start a new run" not in str(raised.value)


def test_one_checkpoint_that_cannot_be_read_is_passed_over(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointing, seen = make()
    save(checkpointing, 10, best=3.0)
    save(checkpointing, 20)
    unreadable(monkeypatch, errno.EIO, "step-00000020/state.json")
    found = checkpointing.newest()
    assert found is not None and found.step == 10
    assert "Input/output error" in seen[-1]["detail"] and seen[-1]["action"] == "use the one before it"


def test_checkpoints_without_a_file_are_damaged(make: Made, tmp_path: Path) -> None:
    checkpointing, _ = make()
    save(checkpointing, 10)
    (tmp_path / "checkpoints" / "step-00000010" / "state.json").unlink()
    with pytest.raises(RequestError, match="start a new run"):
        checkpointing.newest()


def test_a_stale_file_is_opened_again(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointing, _ = make()
    save(checkpointing, 10)
    original, stale = os.open, ["manifest.json", "state.json", "recipe.yaml"]

    def replaced(path: Any, *more: Any, **options: Any) -> int:
        if (name := Path(str(path)).name) in stale:
            stale.remove(name)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return original(path, *more, **options)

    monkeypatch.setattr(os, "open", replaced)
    found = checkpointing.newest()
    assert found is not None and found.step == 10 and not stale


def test_what_completes_a_checkpoint_in_the_background_is_in_its_phase(
    make: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointing, _ = make("checkpoint.background=true")
    save(checkpointing, 10)
    monkeypatch.setattr(heartbeat, "_own", Heartbeat(tmp_path / "beat"))
    heartbeat.begin_phase("step policies and observers", 11)

    def complete() -> bool:
        checkpointing.advance([checkpointing.report])
        return checkpointing.step == 10

    wait_for(complete)
    beat = read(tmp_path / "beat")
    assert beat is not None and beat.phase == "checkpoint"
    checkpointing.close()
