"""The fused kernels, compiled to the machine code of GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia.compiler")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What threads need, for each launch and each GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.support.compiled_kernels"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_compile_for_gpus_of_every_kind(launches: list[dict[str, Any]]) -> None:
    kernels = {"cross_entropy", "rms_norm", "rms_norm_backward", "gated", "gated_backward", "rotary"}
    gpus = {"A100", "H100", "B200", "RTX 5090", "MI300X"}
    assert {(launch["kernel"], launch["gpu"]) for launch in launches} == {(k, g) for k in kernels for g in gpus}


def test_no_thread_keeps_numbers_in_memory_for_want_of_registers(launches: list[dict[str, Any]]) -> None:
    measured = [launch for launch in launches if "stack" in launch]
    assert len(measured) == len(launches) // 5 * 4
    assert [launch for launch in measured if launch["stack"]] == []
