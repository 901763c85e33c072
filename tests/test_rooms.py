"""The packages beside the core: training needs none of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import trainwright
from tests.support.commands import PATIENCE, ROOT, environment
from tests.support.runs import events

ROOMS = ("faults", "observe")  # those that nothing of the core imports


def test_a_run_is_trained_without_the_rooms(tmp_path: Path) -> None:
    """On two processes, to its end, from a copy of the package whose folders of the rooms are deleted."""
    copy = tmp_path / "trainwright"
    shutil.copytree(Path(trainwright.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for room in ROOMS:
        shutil.rmtree(copy / room)
    run = tmp_path / "run"
    words = [str(ROOT / "recipes" / "sft" / "tiny.yaml"), "train.max_steps=2", f"logging.run_directory={run}"]
    command = [sys.executable, "-m", "trainwright", "train", *words, "parallel.num_processes=2"]
    done = subprocess.run(
        command,
        env=environment(PYTHONPATH=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    (start,) = events(run, "start")
    assert start["world_size"] == 2 and (run / "final").is_dir()
    assert list((run / "tensorboard").iterdir()) and "finished at step 2" in done.stderr + done.stdout
