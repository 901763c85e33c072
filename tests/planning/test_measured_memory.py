"""Predicted memory against real runs, by the bench that counts every allocation of every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


ONE_OF_EACH = (["--seed", "3", "--cases", "6"], {"single", "ddp", "fsdp", "zero1", "zero2", "zero3"}, 5)
QLORA_UNDER_ZERO = (["--seed", "1", "--cases", "24", "--only", "qlora", "--only", "zero"], {"zero2", "zero3"}, 2)

BF16_WEIGHTS = (["--seed", "3", "--cases", "3", "--only", "pack", "--bf16-weights"], {"single", "fsdp"}, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "strategies", "count"), [ONE_OF_EACH, QLORA_UNDER_ZERO, BF16_WEIGHTS])
def test_peaks_are_predicted_to_a_twentieth(cases: list[str], strategies: set[str], count: int, tmp_path: Path) -> None:
    """Each with a family, shapes, a precision and perhaps an adapter of its own."""
    output = tmp_path / "results.json"
    command = [sys.executable, "plan_accuracy.py", *cases, "--output", str(output)]
    subprocess.run(command, cwd=BENCH, check=True, timeout=600)
    measured = json.loads(output.read_text())["cases"]
    assert len(measured) >= count and {case["strategy"] for case in measured} <= strategies
    assert {case["case"]: case["error"] for case in measured if abs(case["error"]) > 0.05} == {}
