"""The bench beside other tools on a GPU, on tiny models here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT


@pytest.mark.slow
def test_a_dry_run_measures_every_contender_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu_peers.py"), "--dry-run", "--output", str(output)]
    command += ["--peers", str(tmp_path / "none")]

    first = subprocess.run([*command, "--only", "gpt2"], capture_output=True, text=True, check=True)
    measured = json.loads(output.read_text())["cases"]["gpt2-124m"]
    assert list(measured) == ["Trainwright", "Trainwright compiled", "torch compiled"]
    eager, compiled, plain = measured.values()
    assert eager["tokens_per_second"] > 0 and plain["tokens_per_second"] > 0
    assert abs(eager["loss"] - compiled["loss"]) < 1e-4 and abs(eager["loss"] - plain["loss"]) < 0.3
    assert "torch compiled" in first.stdout.splitlines()[-1]

    results = json.loads(output.read_text())
    del results["cases"]["gpt2-124m"]["torch compiled"]
    output.write_text(json.dumps(results))
    again = subprocess.run([*command, "--only", "gpt2"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in again.stdout.splitlines() if line.startswith("{")]
    assert [line["contender"] for line in lines] == ["torch compiled"]
    assert json.loads(output.read_text())["cases"]["gpt2-124m"]["Trainwright"] == eager


@pytest.mark.slow
def test_a_peer_that_is_missing_is_named_and_ours_decide_the_exit_code(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    ours = {name: {"tokens_per_second": 9.0, "memory_bytes": 0, "first_step_seconds": 1.0, "loss": 1.0,
                   "mfu_of_a_token_per_second": 0.01} for name in ("Trainwright", "Trainwright compiled")}  # fmt: skip
    output.write_text(json.dumps({"machine": {}, "cases": {"smollm2-135m": ours}}))
    command = [sys.executable, str(ROOT / "bench" / "gpu_peers.py"), "--dry-run", "--only", "smollm2"]
    ended = subprocess.run(
        [*command, "--output", str(output), "--peers", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "No module named 'trl'" in json.loads(output.read_text())["cases"]["smollm2-135m"]["TRL"]["error"]
    assert "9.0%" in ended.stdout and "No module named 'trl'" in ended.stdout.splitlines()[-1]
