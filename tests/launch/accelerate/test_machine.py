"""Whether a machine can do what a file asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.accelerate import files
from tests.launch.accelerate.files import CPU, gpus, meaning
from trainwright.errors import MachineError
from trainwright.launch.accelerate.machine import lacking, require
from trainwright.machine.detect import Machine

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
        (files.TWO_NODES, gpus(4)),
    ],
)
def test_enough(tmp_path: Path, text: str, machine: Machine) -> None:
    assert lacking(meaning(tmp_path, text), machine) is None


@pytest.mark.parametrize(
    ("text", "machine", "reason", "instead"),
    [
        (FOUR, CPU, "MULTI_GPU asks for 4 GPUs, and there is none here", "MULTI_CPU, use_cpu: true, num_processes: 2"),
        (FOUR, gpus(2), "4 processes are asked for, one a GPU, but there are 2 GPUs here", "num_processes: 2"),
        (FOUR + "gpu_ids: 0,1\n", gpus(8), "gpu_ids names 2 GPUs", "num_processes: 8"),
        (FOUR + "gpu_ids: 0,1,2,9\n", gpus(8), "gpu_ids names 9, but there are 8 GPUs", "num_processes: 8"),
        (files.FSDP_1, CPU, "FSDP asks for 4 GPUs", "distributed_type: FSDP, use_cpu: true, num_processes: 2"),
        (files.TWO_NODES, CPU, "DEEPSPEED asks for 4 GPUs on this machine", "num_machines: 1"),
        (files.TWO_NODES, gpus(2), "4 processes are asked for on this machine", "num_processes: 2, num_machines: 1"),
    ],
)
def test_too_little_stops_and_says_what_would_run(
    tmp_path: Path, text: str, machine: Machine, reason: str, instead: str
) -> None:
    with pytest.raises(MachineError) as refused:
        require(meaning(tmp_path, text), machine)
    assert reason in str(refused.value) and "here would run" in str(refused.value)
    assert instead in str(refused.value) and "accelerate.yaml" in str(refused.value)
