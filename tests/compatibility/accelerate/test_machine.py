"""Whether a machine can do what a file asks."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.compatibility.accelerate import files
from tests.compatibility.accelerate.files import CPU, gpus, translation, written
from tests.support.commands import trainwright
from trainwright.compatibility.accelerate.launcher import find_translation
from trainwright.compatibility.accelerate.machine import list_lacking, require, show
from trainwright.compatibility.accelerate.reading import read
from trainwright.compatibility.accelerate.translation import interpret
from trainwright.errors import MachineError, RequestError
from trainwright.machine.machine import Machine

FOUR = "distributed_type: MULTI_GPU\nnum_processes: 4\n"


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        (files.TWO_CPU, CPU),
        (files.TWO_CPU, gpus(1)),
        (files.FSDP_2, CPU),
        ("distributed_type: NO\n", CPU),
        ("distributed_type: NO\n", gpus(8)),
        (FOUR, gpus(4)),
        (FOUR, gpus(8)),
        (FOUR + "gpu_ids: 0,2,4,6\n", gpus(8)),
        (FOUR.replace("4", "8") + "num_machines: 2\nmain_process_ip: host\n", gpus(4)),
    ],
)
def test_enough(tmp_path: Path, text: str, machine: Machine) -> None:
    assert list_lacking(translation(tmp_path, text), machine) == []


@pytest.mark.parametrize(
    ("text", "machine", "reason", "instead"),
    [
        (FOUR, CPU, "MULTI_GPU requires 4 GPUs, but none is available", "MULTI_CPU, use_cpu: true, num_processes: 2"),
        (FOUR, gpus(2), "4 processes are requested, one per GPU, but there are 2 GPUs here", "num_processes: 2"),
        (FOUR + "gpu_ids: 0,1\n", gpus(8), "gpu_ids names 2 GPUs", "num_processes: 8"),
        (FOUR, gpus(1), "one per GPU, but there is 1 GPU here", "num_processes: 1"),
        (FOUR + "gpu_ids: 0,1,2,9\n", gpus(8), "gpu_ids names 9, but there are 8 GPUs", "num_processes: 8"),
        (files.FSDP_1, CPU, "FSDP requires 4 GPUs", "distributed_type: FSDP, use_cpu: true, num_processes: 2"),
        (files.TWO_NODES, CPU, "DEEPSPEED requires 4 GPUs on this machine", "num_machines: 1"),
        (files.TWO_NODES, gpus(2), "4 processes are requested on this machine", "num_processes: 2, num_machines: 1"),
    ],
)
def test_too_little_stops_and_says_what_would_run(
    tmp_path: Path, text: str, machine: Machine, reason: str, instead: str
) -> None:
    with pytest.raises(MachineError) as refused:
        require(translation(tmp_path, text), machine)
    assert reason in str(refused.value) and "possible here" in str(refused.value)
    assert instead in str(refused.value) and "accelerate.yaml" in str(refused.value)


@pytest.mark.parametrize(("ids", "on", "refused"), [("", 4, True), ("", 8, False), ("gpu_ids: 0,1,2,3\n", 8, True)])
def test_a_count_of_one_machine_in_a_file_of_two_is_refused_with_both_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str, on: int, refused: bool
) -> None:
    (tmp_path / "machine.json").write_text(json.dumps({"machine": asdict(gpus(on))}))
    monkeypatch.setenv("TRAINWRIGHT_MACHINE", str(tmp_path / "machine.json"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")  # which the file changes
    file = written(tmp_path, f"{FOUR}num_machines: 2\nmain_process_ip: host\nmain_process_port: 1234\n{ids}")
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('started')")
    said = r"num_processes: 4 counts the processes of all 2 machines together, .* 2 of its 4 GPUs; set it to 8, or pass"
    if refused:
        with pytest.raises(RequestError, match=said):
            find_translation(file, [])
        launch = trainwright("launch", "--config-file", str(file), str(script), cwd=tmp_path)
        assert launch.returncode == 2 and re.search(said, launch.stderr), launch.stderr
    else:
        assert find_translation(file, []).local_processes == 2
    assert find_translation(file, ["parallel.num_processes=4"]).local_processes == 2, "as the command line says"


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


@pytest.mark.usefixtures("without_deepspeed")
def test_a_missing_library_stops_what_is_trained_and_not_a_script(tmp_path: Path) -> None:
    found = translation(tmp_path, files.INLINE_ZERO)
    with pytest.raises(MachineError, match=r"accelerate\.yaml: .* need DeepSpeed, .*; pip install"):
        require(found, CPU)
    require(found, CPU, for_script=True)
    assert len(list_lacking(translation(tmp_path, files.TWO_NODES), CPU)) == 3, "GPUs, what would run, DeepSpeed"
    assert list_lacking(translation(tmp_path, files.INLINE_ZERO.replace("stage: 2", "stage: 0")), CPU) == []


def shown(directory: Path, text: str, machine: Machine = CPU) -> str:
    source = read(written(directory, text))
    return show(source, interpret(source), machine, width=1000)


@pytest.mark.usefixtures("without_deepspeed")
def test_what_a_missing_library_keeps_from_running_is_not_offered(tmp_path: Path) -> None:
    screen = shown(tmp_path, files.INLINE_ZERO)
    assert "cannot run: parallel.strategy: zero1, zero2 and zero3 need DeepSpeed" in screen and "pip install" in screen
    assert "runs: " not in screen and "--accelerate-config" not in screen and "SCRIPT" not in screen


@pytest.mark.parametrize(
    ("text", "machine", "train", "launch"),
    [
        (files.TWO_CPU, CPU, True, True),
        (files.FSDP_2, CPU, True, False),  # Accelerate's library would run it as DDP
        (FOUR, gpus(4), True, True),
        (FOUR, gpus(2), False, False),
        (FOUR.replace("4", "8") + "num_machines: 2\nmain_process_ip: host\n", gpus(4), True, False),
        (FOUR.replace("4", "8") + "num_machines: 2\n", gpus(4), False, False),
        (FOUR + "mixed_precision: fp8\n", gpus(4), False, True),
        (FOUR + "num_procesess: 4\n", gpus(4), False, False),
    ],
)
def test_only_commands_that_do_not_refuse_the_file_are_offered(
    tmp_path: Path, text: str, machine: Machine, train: bool, launch: bool
) -> None:
    screen = shown(tmp_path, text, machine)
    assert ("trainwright train RECIPE" in screen, "trainwright launch --config-file" in screen) == (train, launch)
