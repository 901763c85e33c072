"""Runs by the code for GPUs, on GPUs that compute: their losses are those of CPUs, and mixed devices are errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, environment
from tests.support.runs import ON_ROWS, TINY, column, difference, events

GOLDEN = ROOT / "tests" / "engine" / "golden" / "tiny.json"


def trained(directory: Path, machine: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`trainwright train` on a machine with such GPUs."""
    fixed = (ON_ROWS, f"logging.run_directory={directory / 'run'}", "logging.observers.tensorboard=false")
    command = [sys.executable, "-m", "tests.support.computing_gpus", machine, "train", str(TINY)]
    return subprocess.run(
        [*command, *fixed, *overrides], env=environment(), cwd=directory, capture_output=True, text=True
    )


def check_golden(directory: Path, machine: str, *overrides: str) -> None:
    """The run has the losses that test_same_run.py holds for CPUs, on devices of its own."""
    ended = trained(directory, machine, *overrides)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run, golden = directory / "run", json.loads(GOLDEN.read_text())
    assert events(run, "start")[0]["device"] == machine.partition("x")[2]
    assert column(run, "tokens") == golden["tokens"]
    assert difference(column(run, "loss"), golden["loss"]) < 1e-4
    for event, expected in zip(events(run, "evaluate"), golden["validation"], strict=True):
        assert event["metrics"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["1xT4", "1xMI300X", "1xB580"])
def test_the_golden_losses_on_a_gpu(tmp_path: Path, machine: str) -> None:
    """Of NVIDIA, of AMD, and of Intel, which is no cuda device."""
    check_golden(tmp_path, machine, "train.mixed_precision=no")


@pytest.mark.slow
def test_the_golden_losses_on_several_gpus_of_intel(tmp_path: Path) -> None:
    check_golden(tmp_path, "2xB580", "train.mixed_precision=no", "parallel.num_processes=2", "parallel.strategy=fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ("parallel.strategy=ddp",),
        ("parallel.strategy=fsdp", "parallel.reshard_after_forward=false"),
        ("parallel.strategy=fsdp", "parallel.reshard_after_forward=true"),
        ("parallel.strategy=fsdp", "parallel.offload_parameters=true"),
    ],
    ids=" ".join,
)
def test_the_golden_losses_on_several_gpus(tmp_path: Path, how: tuple[str, ...]) -> None:
    check_golden(tmp_path, "2xT4", "parallel.num_processes=2", *how)


@pytest.mark.slow
def test_what_cuda_refuses_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.planning.simulation.devices"]
    ended = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    allowed = {"a number of the host", "indices of the host", "copies", "pinned memory"}
    for name, error in found.items():
        assert (error is None) == (name in allowed), (name, error)
        assert error is None or "device" in error, (name, error)


@pytest.mark.slow
def test_gpus_are_those_that_the_environment_and_an_accelerate_file_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerate.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    ended = trained(tmp_path, "4xT4", "--accelerate-config", "accelerate.yaml", "train.max_steps=1")
    assert ended.returncode == 0, ended.stderr
    (start,) = events(tmp_path / "run", "start")
    assert (start["world_size"], start["strategy"]) == (2, "fsdp")


@pytest.mark.slow
def test_a_tensor_left_on_the_host_ends_the_run_with_its_line(tmp_path: Path) -> None:
    ended = trained(tmp_path, "1xT4", "train.step_policies=[tests.planning.simulation.policies:LeavesMaskOnHost]")
    assert ended.returncode == 4
    assert "cuda:0 and cpu" in ended.stderr and "masked_fill" in ended.stderr
