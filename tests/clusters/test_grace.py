"""Warnings about a stop that takes longer than a cluster or a launcher waits before it kills."""

from __future__ import annotations

import pytest

from trainwright.run.shutdown.exit_code import check_torchrun_time


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_torchrun_that_kills_before_the_last_checkpoint_is_warned_of(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    warning = str(check_torchrun_time(31.0, launcher))
    assert f"{launcher} kills the processes 30 s after a signal" in warning and "trainwright under" in warning
    assert check_torchrun_time(30.0, launcher) is None and check_torchrun_time(31.0, "srun") is None
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    assert check_torchrun_time(31.0, launcher) is None and "3600 s" in str(check_torchrun_time(3601.0, launcher))
