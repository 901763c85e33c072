"""Predicted memory against real runs, by the bench that counts every allocation of every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_peaks_are_predicted_to_a_twentieth(seed: int, tmp_path: Path) -> None:
    """One case of each strategy, each with a family, shapes, a precision and perhaps an adapter of its own."""
    output = tmp_path / "results.json"
    command = [sys.executable, "plan_accuracy.py", "--seed", str(seed), "--cases", "6", "--output", str(output)]
    subprocess.run(command, cwd=BENCH, check=True, timeout=600)
    cases = json.loads(output.read_text())["cases"]
    assert len(cases) >= 5
    assert {case["case"]: case["error"] for case in cases if abs(case["error"]) > 0.05} == {}
